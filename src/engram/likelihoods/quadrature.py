r"""Smooth losses of independent outputs, averaged by Gauss-Hermite quadrature.

.. math:: \mathbb{E}[h(f)] \approx \sum_q w_q\, h(m + \sqrt{v}\, z_q)

The derivatives by the mean are those of the loss under the same sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engram.errors import LikelihoodError
from engram.likelihoods.base import ExpectedLoss

if TYPE_CHECKING:
    from engram.likelihoods.elementwise import ElementwiseLikelihood

NUM_POINTS = 100  # evaluations an output: good to 1e-7 for variances up to 2, of a count too
FEWEST_POINTS = 8  # below, the sum is no integral of a logistic loss


class Quadrature(ExpectedLoss):
    """A likelihood whose outputs are independent, averaged output by output.

    Args:
        base: the likelihood.
        num_points: of the quadrature.
    """

    def __init__(self, base: ElementwiseLikelihood, num_points: int = NUM_POINTS) -> None:
        if num_points < FEWEST_POINTS:
            raise LikelihoodError(
                f"at least {FEWEST_POINTS} quadrature points",
                repr(num_points),
                f"use num_points={NUM_POINTS}",
            )
        self.base, self.name, self.num_points = base, base.name, num_points

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.base.prepare(outputs, targets)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.base.loss(outputs, targets)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self._average(mean, variance, lambda f: self._losses(f, targets)).sum(1)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self._average(mean, variance, lambda f: self._at(self.base.residual, f, targets))

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self._average(
            mean, variance, lambda f: self._at(self.base.hessian_diagonal, f, targets)
        )

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        points, weights = self._nodes(mean, variance)
        return -torch.logsumexp(weights.log() - self._losses(points, targets), 0).sum(1)

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self._average(mean, variance, self.base.mean)

    def _nodes(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Places [Q, N, K] and weights [Q, 1, 1]."""
        places, weights = np.polynomial.hermite_e.hermegauss(self.num_points)
        standard = torch.as_tensor(places).to(mean)[:, None, None]
        shares = torch.as_tensor(weights / weights.sum()).to(mean)[:, None, None]
        return mean + variance.sqrt() * standard, shares

    def _average(
        self, mean: Tensor, variance: Tensor, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        points, weights = self._nodes(mean, variance)
        return (weights * function(points)).sum(0)

    def _losses(self, points: Tensor, targets: Tensor) -> Tensor:
        return self._at(self.base.losses, points, targets)

    def _at(
        self, function: Callable[[Tensor, Tensor], Tensor], points: Tensor, targets: Tensor
    ) -> Tensor:
        """A function of outputs and targets, of the same shape, at points [Q, N, K]."""
        repeated = targets.expand_as(points).flatten(0, 1)
        return function(points.flatten(0, 1), repeated).unflatten(0, points.shape[:2])

    def __repr__(self) -> str:
        return f"expected {self.base!r}"
