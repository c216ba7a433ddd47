r"""Counts with an unknown rate.

.. math:: \theta \sim \mathrm{Gamma}(a, \text{rate } b), \quad
    y \sim \mathrm{Poisson}(t\,\theta), \quad
    T(\theta) = (\log\theta, -\theta), \quad \lambda = (a - 1, b), \quad \tilde\lambda = (y, t)

t is the exposure of the example, 1 unless it is given.
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
from engram.families.reading import (
    check_lengths,
    check_support,
    read_numbers,
    read_positive,
)


@dataclass(frozen=True)
class GammaPoisson(Family):
    """Counts 0, 1, 2, ..., one per example, or a tuple (counts, exposures).

    Args:
        a: prior number of events.
        b: prior exposure.

    Example:
        >>> GammaPoisson(1.0, 1.0).fit([2, 0, 4]).moments()["mean"]
        tensor(1.7500, dtype=torch.float64)
    """

    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        read_positive(self.a, "prior shape a")
        read_positive(self.b, "prior rate b")

    def read(self, data: Any) -> Observations:
        given = data if isinstance(data, tuple) else (data, None)
        counts = read_numbers(given[0], "counts")
        whole = (counts >= 0) & (counts == counts.round())
        check_support(whole, counts, "counts 0, 1, 2, ...", "give whole numbers of events")
        exposures = (
            torch.ones_like(counts) if given[1] is None else read_numbers(given[1], "exposures")
        )
        check_lengths(counts, exposures, "counts and exposures")
        check_support(exposures > 0, exposures, "positive exposures", "leave such examples out")
        return counts, exposures

    def prior(self) -> Named:
        return gamma_natural(self.a, self.b)

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        counts, exposures = observations
        return {"events": equation.rows(counts), "exposure": equation.rows(exposures)}

    def check(self, natural: Mapping[str, Tensor]) -> None:
        check_gamma(natural)

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        return gamma_standard(natural)

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        return gamma_log_partition(natural)

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        return gamma_moments(natural)

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        counts, exposures = observations
        a, b = self.standard(natural).values()
        combinations = torch.lgamma(a + counts) - torch.lgamma(a) - torch.lgamma(counts + 1)
        none = -a * torch.log1p(exposures / b)
        return combinations + none + torch.special.xlogy(counts, exposures / (b + exposures))

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        counts, exposures = observations
        cavity = gamma_cavity(natural, weights * counts, weights * exposures)
        return self.log_predictive(cavity, observations)
