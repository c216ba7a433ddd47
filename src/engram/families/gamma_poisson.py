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

from engram import equation
from engram.equation import WeightedSum
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.reading import (
    check_lengths,
    check_support,
    read_numbers,
    read_positive,
)
from engram.parameters import Named


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
        return {
            "events": torch.tensor(self.a - 1.0, dtype=torch.float64),
            "exposure": torch.tensor(self.b, dtype=torch.float64),
        }

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        counts, exposures = observations
        return {"events": equation.rows(counts), "exposure": equation.rows(exposures)}

    def check(self, natural: Mapping[str, Tensor]) -> None:
        a, b = self.standard(natural).values()
        if not (a > 0 and b > 0):
            raise improper("a Gamma with positive a and b", f"a={float(a):.4g}, b={float(b):.4g}")

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        return {"a": natural["events"] + 1, "b": natural["exposure"]}

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        a, b = self.standard(natural).values()
        return torch.lgamma(a) - a * b.log()

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        a, b = self.standard(natural).values()
        return {"mean": a / b, "variance": a / b**2}

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
        cavity = {
            "events": natural["events"] - weights * counts,
            "exposure": natural["exposure"] - weights * exposures,
        }
        check_cavities((cavity["events"] > -1) & (cavity["exposure"] > 0))
        return self.log_predictive(cavity, observations)
