"""Trainings that end at no minimum: from new first weights, or a recorded one walked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from engram.core.arguments import is_number, shown
from engram.core.identity.digests import of_tensors
from engram.core.parameters import uncompiled
from engram.core.state.copies import private_copy
from engram.errors import ArgumentError, TrainingError
from engram.likelihoods import Likelihood
from engram.retraining.user_function import check_arguments, has_moved, trained_model
from engram.training.order import StoredOrder
from engram.training.replay import Loss, MakeOptimizer
from engram.training.training import Training


@dataclass(frozen=True)
class FromStart:
    """A training function that begins anew each time, not at the trained model.

    First weights and everything drawn after them come from one seed, the same with and without an
    example, so that their difference is the example's.

    Args:
        train: ``fit(model, data)``, the loop that trained the model.
        start: makes a new model, as in ``lambda: Net()``; or one that is not trained yet.

    Example:
        >>> import torch
        >>> from engram.retraining.retrain import retrain
        >>> def net():
        ...     model = nn.Linear(1, 1, bias=False)
        ...     _ = nn.init.zeros_(model.weight)
        ...     return model
        >>> def fit(model, data):
        ...     model.weight.data += data[1].mean()
        >>> data = (torch.ones(4, 1), torch.tensor([[1.0], [1.0], [1.0], [5.0]]))
        >>> fit(model := net(), data)
        >>> truth = retrain(model, data, [3], train=FromStart(fit, net), likelihood="gaussian")
        >>> truth.outputs, truth.deviation
        (tensor([[2.]]), tensor([[-1.]]))
    """

    train: Callable[[nn.Module, Any], nn.Module | None]
    start: nn.Module | Callable[[], nn.Module]

    def __post_init__(self) -> None:
        if not callable(self.train) or isinstance(self.train, type | nn.Module):
            raise ArgumentError(
                "a training function fit(model, data)", shown(self.train), "pass your own loop"
            )
        check_arguments(self.train, "fit(model, data)")
        if not callable(self.start):
            raise ArgumentError(
                "a function that makes a new model, or a model that is not trained yet",
                shown(self.start),
                "pass start=lambda: Net()",
            )

    def __call__(self, model: nn.Module, data: Any) -> nn.Module:
        """Train a new model on the data; the given one is not looked at."""
        first = self.start if isinstance(self.start, nn.Module) else self.start()
        if not isinstance(first, nn.Module):
            raise ArgumentError("a start that makes a model", shown(first), "return it")
        fresh = private_copy(uncompiled(first))
        kept = private_copy(fresh)
        trained = trained_model(self.train(fresh, data), fresh)
        if trained is fresh and not has_moved(trained, kept):
            raise TrainingError(
                "a training function that trains the model in place or returns the trained one",
                "nothing, with all weights as before",
                "return the trained model",
            )
        return trained


@dataclass(frozen=True, eq=False)
class Replay:
    """A recorded training, walked again without the left-out examples.

    The copy with nothing left out is the recorded training itself, bit for bit, so that nothing but
    the example makes a difference.

    Args:
        training: of ``engram.record(optimizer, model, replay=True)``.
        start: share of the steps from which on they are walked again, by the last checkpoint up to
            there. With 0 it is the truth; later is cheaper, and what the example has done until
            then stays in the weights, of which training forgets some.
        loss, optimizer, before_step: as for :func:`engram.replay`; the loss is that of the
            likelihood where none is given.
    """

    training: Training
    loss: str | Likelihood | Loss | None = None
    optimizer: MakeOptimizer | None = None
    before_step: Callable[[nn.Module], object] | None = None
    start: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.training, Training):
            raise ArgumentError(
                "a recorded training", shown(self.training), "pass what engram.record returned"
            )
        if not (is_number(self.start) and 0 <= self.start < 1):
            raise ArgumentError(
                "a start from 0 to less than 1, a share of the steps", shown(self.start), "use 0"
            )

    def __repr__(self) -> str:
        part = f" from {self.start:.0%} on" if self.start else ""
        steps = f"{self.training.num_steps:,} steps of {self.training.optimizer_name}"
        return f"replay of {steps}{part}"

    @property
    def is_whole(self) -> bool:
        """Whether it begins at the first step, and leaves nothing of an example in."""
        return self.start == 0

    @property
    def content(self) -> tuple[Any, ...]:
        """Steps, first weights and functions, which decide its outcome, for a fingerprint."""
        order = self.training.order
        parts = None if order is None else StoredOrder.of(order)
        first = [snapshot.read() for snapshot in self.training.snapshots()[:1]]
        weights = [of_tensors(tensors) for tensors in first]
        return (parts, weights, self.loss, self.optimizer, self.before_step, self.start)
