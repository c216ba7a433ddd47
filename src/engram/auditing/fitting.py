"""The training of a stock model: recorded, every visit named, stopped by our own estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.auditing.stock.base import Recipe, Stock
from engram.auditing.tasks import Task
from engram.core.arguments import one_of
from engram.core.progress import Bar
from engram.errors import NonFiniteError
from engram.posteriors.laplace import laplace
from engram.sensitivity.leave_one_out import sensitivities
from engram.training.record import record
from engram.training.training import Training

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters, lr, weight_decay: torch.optim.SGD(
        parameters, lr=SGD_FASTER * lr, weight_decay=weight_decay / SGD_FASTER, momentum=0.9
    ),
}
SGD_FASTER = 10.0  # times the learning rate of Adam, and as much less decay a step
# When to stop. From epoch to epoch the estimate goes up and down by a hundredth while it still
# falls, and it turns up before the loss on other data does, as at the last weights alone it
# overshoots: on five tables and two texts that was lowest 0 to 11 epochs later
PATIENCE = 5  # epochs since the lowest estimate
TOLERATED = 1.05  # times the lowest estimate
OVERFITTED = 2  # epochs in a row beyond that


@dataclass(frozen=True)
class Schedule:
    """What a user may say about the training.

    Args:
        epochs: exactly so many, without stopping early; the recipe's if not given.
        optimizer: ``adamw``, ``adam`` or ``sgd``.
        seed: of the first weights, the order and the views.
    """

    epochs: int | None = None
    optimizer: str = "adamw"
    seed: int = 0

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe as the user wants it."""
        one_of("optimizer", self.optimizer, tuple(OPTIMIZERS), 'use "adamw"')
        return (
            recipe
            if self.epochs is None
            else replace(recipe, epochs=self.epochs, stops_early=False)
        )


@dataclass
class Fit:
    """A trained model with its record.

    Args:
        model: in eval mode.
        training: the record; None where nobody recorded it.
        curve: for every epoch its number, the training loss, and the leave-one-out estimate.
        stopped: the last epoch, where the estimate stopped it; None where it ran to the end.
    """

    model: nn.Module
    training: Training | None
    curve: list[dict[str, float]] = field(default_factory=list)
    stopped: int | None = None


Keep = Callable[[Callable[[], Mapping[str, Any]]], None]


def fit(
    stock: Stock,
    targets: Tensor,
    task: Task,
    schedule: Schedule,
    progress: bool,
    state: Mapping[str, Any] | None = None,
    keep: Keep | None = None,
) -> Fit:
    """Train a stock model; the caller keeps the random state.

    Args:
        stock: untrained.
        targets: of its inputs.
        task: for the loss.
        schedule: what the user wants.
        progress: show a bar.
        state: that an earlier call has given to ``keep``, to go on from.
        keep: called after every epoch with a function that gives the state.
    """
    torch.manual_seed(schedule.seed)
    _reset(stock.model)
    loop = _Loop(stock, targets, task, schedule)
    if state is not None:
        loop.load_state(state)
    with Bar(loop.recipe.epochs, f"training the {stock.name}", progress) as bar:
        bar.update(loop.done)
        while not loop.is_done:
            loop.epoch()
            bar.update()
            if keep is not None:
                keep(loop.state)
    return loop.finished()


class _Loop:
    """A training, epoch by epoch."""

    def __init__(self, stock: Stock, targets: Tensor, task: Task, schedule: Schedule) -> None:
        self.stock, self.targets, self.task = stock, targets, task
        self.recipe, self.seed = schedule.of(stock.recipe), schedule.seed
        self.optimizer = OPTIMIZERS[schedule.optimizer](
            stock.model.parameters(),
            lr=self.recipe.learning_rate,
            weight_decay=self.recipe.weight_decay,
        )
        self.steps = -(-len(targets) // self.recipe.batch_size)
        self.training = record(
            self.optimizer,
            stock.model,
            replay=self.recipe.augment is None,
            likelihood=task.likelihood,
            augment=self.recipe.augment,
            num_steps=None if self.recipe.stops_early else self.steps * self.recipe.epochs,
        )
        self.fit = Fit(stock.model, self.training)
        self.done = 0

    def state(self) -> dict[str, Any]:
        """Everything that the next epoch depends on."""
        return {
            "done": self.done,
            "stopped": self.fit.stopped,
            "curve": self.fit.curve,
            "model": self.stock.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "training": self.training.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        self.stock.model.load_state_dict(state["model"])
        kept = dict(state["optimizer"])
        kept["state"] = {int(number): value for number, value in kept["state"].items()}
        self.optimizer.load_state_dict(kept)
        self.training.load_state_dict(state["training"])
        self.fit.curve.extend(dict(point) for point in state["curve"])
        self.done, self.fit.stopped = state["done"], state["stopped"]

    @property
    def is_done(self) -> bool:
        return self.done >= self.recipe.epochs or self.fit.stopped is not None

    def epoch(self) -> None:
        """One pass over the examples, in an order that seed and epoch alone decide."""
        model, recipe = self.stock.model.train(), self.recipe
        torch.manual_seed(self.seed * 1_000_003 + self.done)
        total = 0.0
        for number, batch in enumerate(_batches(len(self.targets), recipe.batch_size)):
            self._set_rate(self.done + number / self.steps)
            inputs = self.stock.inputs[batch]
            self.training.note(batch)
            outputs = model(inputs if recipe.augment is None else recipe.augment(inputs))
            self.training.visit(batch, outputs, self.targets[batch])
            loss = self.task.loss(outputs, self.targets[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += float(loss.detach()) * len(batch)
        self.done += 1
        mean = total / len(self.targets)
        if not math.isfinite(mean):
            raise NonFiniteError(
                "a training whose loss stays finite",
                f"{mean} in epoch {self.done}",
                "look at the inputs for extreme values, or use fewer epochs",
            )
        self._look(mean)

    def _set_rate(self, epoch: float) -> None:
        """A cosine to 0, where the recipe has one."""
        if not self.recipe.anneals:
            return
        share = 0.5 * (1 + math.cos(math.pi * epoch / self.recipe.epochs))
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * share

    def _look(self, mean: float) -> None:
        """Note where the training is; stop where our estimate got no better."""
        point = {"epoch": float(self.done), "train": mean}
        self.fit.curve.append(point)
        if not self.recipe.stops_early:
            return
        point["loo"] = self._estimate()
        if is_enough([one["loo"] for one in self.fit.curve]):
            self.fit.stopped = self.done

    def _estimate(self) -> float:
        """The leave-one-out loss at the present weights, from the training data."""
        model = self.stock.model.eval()
        data = (self.stock.inputs, self.targets)
        posterior = laplace(
            model,
            data,
            likelihood=self.task.likelihood,
            training=self.training,
            structure="kronecker",
            curvature="fisher",
            progress=False,
        )
        result = sensitivities(
            model, data, posterior, estimator="linear", diagnostics=False, progress=False
        )
        return result.loo_nll

    def finished(self) -> Fit:
        self.training.stop()
        self.stock.model.eval()
        return self.fit


def is_enough(estimates: Sequence[float]) -> bool:
    """Whether to stop after these estimates, one an epoch.

    Example:
        >>> is_enough([1.0, 0.9, 0.91, 0.9, 0.91, 0.89]), is_enough([1.0, 0.9, 0.96, 0.97])
        (False, True)
    """
    lowest = min(estimates)
    waited = len(estimates) - 1 - list(estimates).index(lowest)
    late = estimates[-OVERFITTED:]
    beyond = len(late) == OVERFITTED and min(late) > TOLERATED * lowest
    return waited >= PATIENCE or beyond


def _batches(count: int, size: int) -> list[Tensor]:
    """Positions in random order; a last one of a single example joins the one before."""
    parts = list(torch.randperm(count).split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _reset(model: nn.Module) -> None:
    """First weights by the seed."""
    for module in model.modules():
        again: Any = getattr(module, "reset_parameters", None)
        if callable(again):
            again()
