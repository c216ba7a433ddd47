r"""Durations with an unknown rate.

.. math:: \theta \sim \mathrm{Gamma}(a, \text{rate } b), \quad y \sim \mathrm{Exp}(\theta), \quad
    T(\theta) = (\log\theta, -\theta), \quad \lambda = (a - 1, b), \quad \tilde\lambda = (1, y)
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
from engram.families.base import Family, Observations
from engram.families.gamma import (
    check_gamma,
    gamma_cavity,
    gamma_log_partition,
    gamma_moments,
    gamma_natural,
    gamma_standard,
)
from engram.families.reading import check_support, read_numbers, read_positive


@dataclass(frozen=True)
class GammaExponential(Family):
    """Positive durations, one per example.

    Args:
        a: prior number of events.
        b: prior total duration.

    Example:
        >>> GammaExponential(1.0, 1.0).fit([0.5, 1.5]).moments()["mean"]
        tensor(1., dtype=torch.float64)
    """

    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        read_positive(self.a, "prior shape a")
        read_positive(self.b, "prior rate b")

    def read(self, data: Any) -> Observations:
        durations = read_numbers(data, "durations")
        check_support(durations > 0, durations, "positive durations", "leave such examples out")
        return (durations,)

    def prior(self) -> Named:
        return gamma_natural(self.a, self.b)

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        (durations,) = observations
        ones = torch.ones_like(durations)
        return {"events": equation.rows(ones), "exposure": equation.rows(durations)}

    def check(self, natural: Mapping[str, Tensor]) -> None:
        check_gamma(natural)

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        return gamma_standard(natural)

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        return gamma_log_partition(natural)

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        return gamma_moments(natural)

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        (durations,) = observations
        a, b = self.standard(natural).values()
        return a.log() - b.log() - (a + 1) * torch.log1p(durations / b)

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        (durations,) = observations
        cavity = gamma_cavity(natural, weights, weights * durations)
        return self.log_predictive(cavity, observations)
