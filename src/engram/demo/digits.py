"""1797 images of handwritten digits, some labels made wrong on purpose, and a net trained on them.

An ordinary training loop: Adam with weight decay, nothing of engram in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

# of scikit-learn's data
NUM_CLASSES = 10  # the digits
PIXELS = 64  # of an image, 8 x 8
BRIGHTEST = 16.0  # value of a white pixel


@dataclass(frozen=True)
class Digits:
    """Images [N, 8, 8] between 0 and 1, with the labels a user would see and the right ones."""

    inputs: Tensor
    labels: Tensor
    true_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def flipped(self) -> Tensor:
        """Which training labels are wrong, [N]."""
        return self.labels != self.true_labels

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Training images with the labels as given."""
        return self.inputs, self.labels

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Test images with their right labels."""
        return self.test_inputs, self.test_labels


def digits(settings: Settings) -> Digits:
    """Split the images and flip some training labels, by seed."""
    source = load_digits()
    images = torch.tensor(source.images, dtype=torch.float32) / BRIGHTEST
    labels = torch.tensor(source.target, dtype=torch.int64)
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(images), generator=generator)
    train, test = order[: settings.num_train], order[settings.num_train :]
    given = flipped(labels[train], settings.flipped_share, generator)
    return Digits(images[train], given, labels[train], images[test], labels[test])


def flipped(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of the labels replaced by another class, each other class alike."""
    count = round(share * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    shift = torch.randint(1, NUM_CLASSES, (count,), generator=generator)
    changed = labels.clone()
    changed[chosen] = (changed[chosen] + shift) % NUM_CLASSES
    return changed


@dataclass(frozen=True)
class Settings:
    """Data, net and training of the demonstration.

    Args:
        seed: of the split, the wrong labels and the first weights.
        num_train: images to train on; the others of the 1797 are test images.
        flipped_share: share of the training labels that is replaced by a wrong one.
        hidden: units of the hidden layer.
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        epochs: of training; the whole training set is one batch.
        learning_rate: Adam's at the start; it falls to zero along a cosine.
        refit_epochs: of training again without a class, from the trained weights.
    """

    seed: int = 0
    num_train: int = 1000
    flipped_share: float = 0.05
    hidden: int = 32
    prior_precision: float = 1.0
    epochs: int = 1000
    learning_rate: float = 0.03
    refit_epochs: int = 500


def network(settings: Settings) -> nn.Sequential:
    """One hidden layer, first weights by seed; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(PIXELS, settings.hidden),
            nn.Tanh(),
            nn.Linear(settings.hidden, NUM_CLASSES),
        )


def adam(model: nn.Module, num_data: int, settings: Settings) -> Optimizer:
    """Adam with the prior as weight decay.

    The regulariser delta/2 |theta|^2 on the sum of N losses is a weight decay of delta/N on their
    mean, and Adam's ``weight_decay`` is that (added to the gradient), unlike AdamW's.
    """
    decay = settings.prior_precision / num_data
    return torch.optim.Adam(model.parameters(), lr=settings.learning_rate, weight_decay=decay)


def train(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    settings: Settings,
    epochs: int,
    optimizer: Optimizer | None = None,
) -> Iterator[float]:
    """Train the model in place; yields the mean loss of every epoch."""
    optimizer = adam(model, len(inputs), settings) if optimizer is None else optimizer
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits, without a graph."""
    with torch.no_grad():
        logits: Tensor = model(inputs)
        return logits


def mean_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Mean cross-entropy, nats per example."""
    inputs, labels = data
    return float(functional.cross_entropy(outputs(model, inputs), labels))
