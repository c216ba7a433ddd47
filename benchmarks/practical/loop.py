"""One training loop for all settings, as people write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from benchmarks.practical.data import Split


class Watcher:
    """What someone may do beside a training; does nothing itself."""

    def started(self, optimizer: optim.Optimizer, model: nn.Module) -> None:
        """Before the first step: the place for ``engram.record(optimizer, model)``."""

    def comes(self, indices: Tensor) -> None:
        """Before the forward pass of a step, with the positions of its examples."""

    def visited(self, indices: Tensor, outputs: Tensor) -> None:
        """After the forward pass of a step, with the positions of its examples."""

    def epoch_ended(self, epoch: int, model: nn.Module) -> None:
        """After each epoch, counted from 1."""


class Recording(Watcher):
    """A training with ``engram.record``; ``training`` is the record from the first step on.

    Args:
        settings: arguments of ``engram.record``.
    """

    training: engram.Training

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def started(self, optimizer: optim.Optimizer, model: nn.Module) -> None:
        self.training = engram.record(optimizer, model, **self.settings)


Schedule = Callable[[optim.Optimizer, int], optim.lr_scheduler.LRScheduler]


def cosine(optimizer: optim.Optimizer, steps: int) -> optim.lr_scheduler.LRScheduler:
    """The learning rate falls to 0 along a cosine."""
    return optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def one_cycle(optimizer: optim.Optimizer, steps: int) -> optim.lr_scheduler.LRScheduler:
    """It rises to three times what it was, and falls to nearly 0."""
    highest = 3 * optimizer.param_groups[0]["lr"]
    return optim.lr_scheduler.OneCycleLR(optimizer, highest, total_steps=steps + 1)


class Examples(TensorDataset):
    """Tensors of which a loader takes a batch at once: the same batches, in less time."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [tensor[indices] for tensor in self.tensors]


@dataclass(frozen=True, eq=False)
class Setting:
    """A net, its data, and how it is trained.

    Args:
        split: the data.
        net: makes a new net.
        optimizer: of a net.
        epochs: passes over the data.
        batch_size: examples of a step.
        schedule: of the learning rate, for an optimizer and a number of steps.
        augment: another view of a batch of inputs.
        subsets: trainings for the truth.
    """

    split: Callable[[], Split]
    net: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], optim.Optimizer]
    epochs: int
    batch_size: int = 64
    schedule: Schedule | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    subsets: int = 64

    def fit(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> nn.Module:
        """Train a new net on all or some of the data; in the form that ``engram.retrain`` takes."""
        return self.watched_fit(model, data, Watcher())

    def train(self, seed: int, watcher: Watcher | None = None) -> nn.Module:
        """A net trained on all the data, everything random from a seed."""
        torch.manual_seed(seed)
        return self.watched_fit(self.net(), self.split().data, watcher or Watcher())

    def watched_fit(
        self, model: nn.Module, data: tuple[Tensor, Tensor], watcher: Watcher
    ) -> nn.Module:
        """The loop."""
        examples = Examples(*data, torch.arange(len(data[0])))
        loader = DataLoader(examples, self.batch_size, shuffle=True, collate_fn=tuple)
        optimizer, steps = self.optimizer(model), self.epochs * len(loader)
        schedule = None if self.schedule is None else self.schedule(optimizer, steps)
        watcher.started(optimizer, model)
        for epoch in range(1, self.epochs + 1):
            model.train()
            for inputs, targets, indices in loader:
                watcher.comes(indices)
                outputs = model(inputs if self.augment is None else self.augment(inputs))
                watcher.visited(indices, outputs)
                optimizer.zero_grad()
                functional.cross_entropy(outputs, targets).backward()
                optimizer.step()
                if schedule is not None:
                    schedule.step()
            watcher.epoch_ended(epoch, model)
        return model.eval()


def flipped(images: Tensor) -> Tensor:
    """Half of the images the other way round."""
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(mirrored, images.flip(3), images)
