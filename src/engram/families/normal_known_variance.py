r"""Numbers with an unknown mean and a known variance.

.. math:: \mu \sim N(m, v), \quad y \sim N(\mu, s^2), \quad
    T(\mu) = (\mu, \mu^2), \quad \lambda = \Big(\frac{m}{v}, -\frac{1}{2v}\Big), \quad
    \tilde\lambda = \Big(\frac{y}{s^2}, -\frac{1}{2s^2}\Big)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.densities import normal_log_density
from engram.families.reading import read_number, read_numbers, read_positive


@dataclass(frozen=True)
class NormalKnownVariance(Family):
    """A normal distribution of unknown mean and known variance; data are numbers, one per example.

    Args:
        variance: s^2, of an example around the mean; known.
        prior_mean: m.
        prior_variance: v.

    Example:
        >>> NormalKnownVariance(1.0, 0.0, 1.0).fit([1.0, 2.0]).moments()
        {'mean': tensor(1., dtype=torch.float64), 'variance': tensor(0.3333, dtype=torch.float64)}
    """

    variance: float = 1.0
    prior_mean: float = 0.0
    prior_variance: float = 1.0

    def __post_init__(self) -> None:
        read_positive(self.variance, "variance")
        read_number(self.prior_mean, "prior_mean")
        read_positive(self.prior_variance, "prior_variance")

    def read(self, data: Any) -> Observations:
        return (read_numbers(data, "numbers"),)

    def prior(self) -> Named:
        return {
            "linear": torch.tensor(self.prior_mean / self.prior_variance, dtype=torch.float64),
            "quadratic": torch.tensor(-0.5 / self.prior_variance, dtype=torch.float64),
        }

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        (numbers,) = observations
        precisions = torch.full_like(numbers, 1 / self.variance)
        return {
            "linear": equation.rows(numbers / self.variance),
            "quadratic": equation.rows(-0.5 * precisions),
        }

    def check(self, natural: Mapping[str, Tensor]) -> None:
        if not natural["quadratic"] < 0:
            precision = -2 * float(natural["quadratic"])
            raise improper("a normal with positive precision", f"{precision:.4g}")

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        variance = -0.5 / natural["quadratic"]
        return {"mean": natural["linear"] * variance, "variance": variance}

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        mean, variance = self.standard(natural).values()
        return 0.5 * (mean**2 / variance + (2 * torch.pi * variance).log())

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        return self.standard(natural)

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        (numbers,) = observations
        mean, variance = self.standard(natural).values()
        return normal_log_density(numbers - mean, variance + self.variance)

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        (numbers,) = observations
        cavity = {
            "linear": natural["linear"] - weights * numbers / self.variance,
            "quadratic": natural["quadratic"] + 0.5 * weights / self.variance,
        }
        check_cavities(cavity["quadratic"] < 0)
        return self.log_predictive(cavity, observations)
