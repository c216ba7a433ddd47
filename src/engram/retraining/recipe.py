"""What a recipe is: a way to train a stack of copies, and what it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engram.core.arguments import positive, whole
from engram.core.data.batches import Data
from engram.core.dtypes import wide
from engram.core.selection import spread
from engram.likelihoods import Likelihood
from engram.retraining.quasi_newton import Objective, left_out_norms

Report = Callable[[float], None]
TYPICAL_EXAMPLES = 64
ROUNDINGS = 64  # of the regulariser's gradient: what a sum over many examples cannot resolve


@dataclass(frozen=True)
class Trained:
    """A stack after training.

    Args:
        flat: parameters, [C, P].
        gradient_norm: norm of the gradient of each copy's objective (a sum over examples), [C].
        wanted_norm: the norm at which it counts as converged; infinite for a recipe that trains
            for a fixed time, [C].
        evaluations: gradients over the data that each copy took, [C].
    """

    flat: Tensor
    gradient_norm: Tensor
    wanted_norm: Tensor
    evaluations: Tensor


class Recipe(ABC):
    """A way to train a stack of copies."""

    converges: bool

    def bind(
        self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float, progress: bool
    ) -> Recipe:
        """The recipe with everything it needs to know about the trained model."""
        return self

    def rebind(self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float) -> Recipe:
        """The same after the model's weights have moved."""
        return self

    @abstractmethod
    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        """Train all copies from ``start`` [C, P]."""


def check_positive(recipe: object, **values: float) -> None:
    """Numbers above 0; as Python's own in the recipe."""
    for name, value in values.items():
        object.__setattr__(recipe, name, positive(name, value, f"check {recipe!r}"))


def check_counts(recipe: object, **values: int | None) -> None:
    """Whole numbers from 1 on, as Python's own in the recipe; no batch size says all."""
    for name, value in values.items():
        if value is not None or name != "batch_size":
            object.__setattr__(recipe, name, whole(name, value, 1, None, f"check {recipe!r}"))


def wanted_norms(objective: Objective, start: Tensor, tolerance: float) -> Tensor:
    """Gradient norms at which copies count as converged, [C].

    A share of what leaving out brought in; for a refit with everything, of a typical example's
    gradient. Rounding in the sum of gradients sets the lowest norm that can be asked for.
    """
    stack, members = objective.stack, objective.members
    none = torch.tensor([len(chosen) == 0 for chosen in members])
    norms = left_out_norms(stack, start[:1], members).cpu()
    if none.any():
        some = spread(stack.num_data, TYPICAL_EXAMPLES)
        typical = left_out_norms(stack, start[:1], [i[None] for i in some])
        norms[none] = float(typical.median())
    regulariser = wide(stack.prior_precision * start).norm(dim=1).cpu()
    rounding = ROUNDINGS * torch.finfo(start.dtype).eps * regulariser
    return torch.maximum(tolerance * norms, rounding)
