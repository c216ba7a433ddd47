r"""Numbers that are linear in known inputs, with known noise.

.. math:: \theta \sim N(0, S_0^{-1}), \quad y \sim N(x'\theta, s^2), \quad
    T(\theta) = (\theta, \theta\theta'), \quad \lambda = (S m, -\tfrac12 S), \quad
    \tilde\lambda = (x y / s^2, -\tfrac12 x x'/s^2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.errors import ArgumentError, PosteriorError
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.densities import normal_log_density
from engram.families.reading import (
    check_lengths,
    read_covariance,
    read_numbers,
    read_pair,
    read_positive,
    read_vectors,
)

# of the precision with a diagonal of ones; below, sums of products have lost more than seven digits
SMALLEST_PIVOT = 1e-9


@dataclass(frozen=True, eq=False)
class LinearRegression(Family):
    """Bayesian linear regression with known noise and a Gaussian prior on the coefficients.

    Data are a tuple (inputs [N, P], targets [N]); a column of ones in the inputs is an intercept.

    Args:
        num_inputs: P.
        noise_variance: s^2, known.
        prior_precision: S_0, a matrix [P, P] or a number for its multiple of the identity.

    Example:
        >>> regression = LinearRegression(1, noise_variance=1.0, prior_precision=1.0)
        >>> regression.fit(([[1.0], [2.0]], [1.0, 3.0])).moments()["mean"]
        tensor([1.1667], dtype=torch.float64)
    """

    num_inputs: int
    noise_variance: float = 1.0
    prior_precision: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.num_inputs, Integral) or self.num_inputs < 1:
            raise ArgumentError("at least one input", repr(self.num_inputs), "give their number")
        object.__setattr__(self, "num_inputs", int(self.num_inputs))
        read_positive(self.noise_variance, "noise_variance")
        precision = read_covariance(self.prior_precision, "prior_precision", self.num_inputs)
        object.__setattr__(self, "prior_precision", precision)

    def read(self, data: Any) -> Observations:
        inputs, targets = read_pair(data, "inputs", "targets")
        rows = read_vectors(inputs, "inputs", self.num_inputs)
        numbers = read_numbers(targets, "targets")
        check_lengths(rows, numbers, "inputs and targets")
        return rows, numbers

    def prior(self) -> Named:
        mean = torch.zeros(self.num_inputs, dtype=torch.float64)
        return equation.gaussian_natural(mean, torch.as_tensor(self.prior_precision))

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        inputs, targets = observations
        return {
            "linear": equation.rows(inputs * (targets / self.noise_variance)[:, None]),
            "quadratic": equation.products(-0.5 / self.noise_variance * inputs, inputs),
        }

    def check(self, natural: Mapping[str, Tensor]) -> None:
        precision = -2 * natural["quadratic"]
        scale = precision.diagonal().clamp(min=0).sqrt()
        if int(torch.linalg.cholesky_ex(precision).info) != 0 or not bool((scale > 0).all()):
            raise improper("a positive definite precision", "one that is not")
        pivots, failed = torch.linalg.cholesky_ex(precision / torch.outer(scale, scale))
        smallest = 0.0 if int(failed) else float(pivots.diagonal().min()) ** 2
        if smallest < SMALLEST_PIVOT:
            raise PosteriorError(
                "inputs whose products keep their digits",
                f"columns that are dependent but for {smallest:.1g} of their squares",
                "centre and scale the inputs, or use a stronger prior",
            )

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        precision = -2 * natural["quadratic"]
        factor = torch.linalg.cholesky(0.5 * (precision + precision.mT))
        mean = torch.cholesky_solve(natural["linear"][:, None], factor)[:, 0]
        return {"mean": mean, "precision": precision}

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        mean, precision = self.standard(natural).values()
        determinant = torch.logdet(precision / (2 * math.pi))
        return 0.5 * (natural["linear"] @ mean - determinant)

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        mean, precision = self.standard(natural).values()
        return {"mean": mean, "variance": torch.linalg.inv(precision)}

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        """Cook's deviation, variance times error, for every example at once."""
        inputs, targets = observations
        mean, precision = self.standard(natural).values()
        factor = torch.linalg.cholesky(precision)
        whitened = torch.linalg.solve_triangular(factor, inputs.mT, upper=False)
        variance = (whitened**2).sum(0)
        kept = 1 - weights * variance / self.noise_variance
        check_cavities(kept > 0)
        variance_left = variance / kept
        error = inputs @ mean - targets
        error_left = error + weights * variance_left * error / self.noise_variance
        return normal_log_density(error_left, variance_left + self.noise_variance)
