"""Built-in ways to train again, each for a whole stack of copies at once.

``SGD`` and ``Adam`` go on training for some epochs; ``LBFGS`` and ``Newton`` train until the
gradient of the copy's own objective has vanished, and start from the refit with everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.arguments import is_number, shown
from engram.core.dtypes import wide
from engram.core.errors import ArgumentError
from engram.linalg.lbfgs import IDENTITY, LBFGSMemory
from engram.retraining.descent import Plan, adam_update, descend, momentum_update
from engram.retraining.newton import Newton
from engram.retraining.quasi_newton import Objective, begin, minimise
from engram.retraining.recipe import (
    Recipe,
    Report,
    Trained,
    check_counts,
    check_positive,
    wanted_norms,
)

__all__ = ["LBFGS", "NAMED", "SGD", "Adam", "Newton", "Recipe"]


@dataclass(frozen=True)
class SGD(Recipe):
    """Stochastic gradient descent with momentum; arguments as in :class:`Adam`."""

    learning_rate: float = 0.05
    epochs: int = 50
    batch_size: int | None = 64
    momentum: float = 0.9
    converges = False

    def __post_init__(self) -> None:
        check_positive(self, learning_rate=self.learning_rate)
        check_counts(self, epochs=self.epochs, batch_size=self.batch_size)
        _check_share("momentum", self.momentum)

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        plan = Plan(self.epochs, self.batch_size, self.learning_rate, seed)
        flat = descend(objective, start, plan, momentum_update(self.momentum), report)
        return _fixed_time(objective, flat, self.epochs)


@dataclass(frozen=True)
class Adam(Recipe):
    """Adam on the mean objective, the regulariser in the gradient.

    Args:
        learning_rate: at the start; it falls to zero along a cosine.
        epochs: passes over the data.
        batch_size: examples per step; None takes all of them.
    """

    learning_rate: float = 1e-3
    epochs: int = 50
    batch_size: int | None = 64
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    converges = False

    def __post_init__(self) -> None:
        check_positive(self, learning_rate=self.learning_rate, epsilon=self.epsilon)
        check_counts(self, epochs=self.epochs, batch_size=self.batch_size)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ArgumentError("two betas", shown(self.betas), "use betas=(0.9, 0.999)")
        for beta in self.betas:
            _check_share("beta", beta)

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        plan = Plan(self.epochs, self.batch_size, self.learning_rate, seed)
        flat = descend(objective, start, plan, adam_update(self.betas, self.epsilon), report)
        return _fixed_time(objective, flat, self.epochs)


@dataclass(frozen=True)
class LBFGS(Recipe):
    """Full-batch L-BFGS, each copy by itself.

    Args:
        tolerance: a copy has converged when its gradient norm is below this share of the norm of
            its left-out examples' gradient, which is what the training has to undo.
        iterations: at most so many steps.
        history: pairs of steps and gradient changes that are kept.
    """

    tolerance: float = 1e-2
    iterations: int = 2000
    history: int = 20
    converges = True

    def __post_init__(self) -> None:
        check_positive(self, tolerance=self.tolerance)
        check_counts(self, iterations=self.iterations, history=self.history)

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        wanted = wanted_norms(objective, start, self.tolerance)
        own = LBFGSMemory(start, self.history)
        state = begin(objective, start)
        minimise(objective, state, wanted, self.iterations, own, IDENTITY, report)
        return Trained(state.flat, state.norm, wanted, state.evaluations)


def _check_share(name: str, value: float) -> None:
    if not is_number(value) or not 0 <= value < 1:
        raise ArgumentError(f"a {name} from 0 to below 1", shown(value), f"use {name}=0.9")


def _fixed_time(objective: Objective, flat: Tensor, epochs: int) -> Trained:
    gradient = objective.stack.value_and_gradient(flat, objective.weights)[1]
    copies = len(flat)
    return Trained(
        flat,
        wide(gradient).norm(dim=1),
        torch.full((copies,), torch.inf, dtype=torch.float64),
        torch.full((copies,), epochs),
    )


NAMED: dict[str, type[Recipe]] = {"sgd": SGD, "adam": Adam, "lbfgs": LBFGS, "newton": Newton}
