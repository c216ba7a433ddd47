r"""Counts and durations with an unknown rate: the Gamma posterior that they share.

.. math:: q(\theta) = \mathrm{Gamma}(a, \text{rate } b), \quad T(\theta) = (\log\theta, -\theta),
    \quad \lambda = (a - 1, b), \quad \tilde\lambda = (\text{events}, \text{exposure})
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.reading import (
    check_lengths,
    check_support,
    read_numbers,
    read_positive,
)


@dataclass(frozen=True)
class GammaFamily(Family):
    """A rate with prior Gamma(a, rate b): what both families share.

    They differ in how many events, and how much exposure, an example counts for.
    """

    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        read_positive(self.a, "prior shape a")
        read_positive(self.b, "prior rate b")

    @abstractmethod
    def statistics(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Events and exposure of every example, [N] each."""

    def prior(self) -> Named:
        return {
            "events": torch.tensor(self.a - 1.0, dtype=torch.float64),
            "exposure": torch.tensor(self.b, dtype=torch.float64),
        }

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        events, exposures = self.statistics(observations)
        return {"events": equation.rows(events), "exposure": equation.rows(exposures)}

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

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        events, exposures = self.statistics(observations)
        cavity = {
            "events": natural["events"] - weights * events,
            "exposure": natural["exposure"] - weights * exposures,
        }
        check_cavities((cavity["events"] > -1) & (cavity["exposure"] > 0))
        return self.log_predictive(cavity, observations)


@dataclass(frozen=True)
class GammaExponential(GammaFamily):
    """Positive durations, one per example: y ~ Exp(theta), with natural parameter (1, y).

    Args:
        a: prior number of events.
        b: prior total duration.

    Example:
        >>> GammaExponential(1.0, 1.0).fit([0.5, 1.5]).moments()["mean"]
        tensor(1., dtype=torch.float64)
    """

    def read(self, data: Any) -> Observations:
        durations = read_numbers(data, "durations")
        check_support(durations > 0, durations, "positive durations", "leave such examples out")
        return (durations,)

    def statistics(self, observations: Observations) -> tuple[Tensor, Tensor]:
        (durations,) = observations
        return torch.ones_like(durations), durations

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        (durations,) = observations
        a, b = self.standard(natural).values()
        return a.log() - b.log() - (a + 1) * torch.log1p(durations / b)


@dataclass(frozen=True)
class GammaPoisson(GammaFamily):
    """Counts 0, 1, 2, ..., one per example, or a tuple (counts, exposures).

    y ~ Poisson(t theta), with natural parameter (y, t); the exposure t is 1 unless it is given.

    Args:
        a: prior number of events.
        b: prior exposure.

    Example:
        >>> GammaPoisson(1.0, 1.0).fit([2, 0, 4]).moments()["mean"]
        tensor(1.7500, dtype=torch.float64)
    """

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

    def statistics(self, observations: Observations) -> tuple[Tensor, Tensor]:
        counts, exposures = observations
        return counts, exposures

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        counts, exposures = observations
        a, b = self.standard(natural).values()
        combinations = torch.lgamma(a + counts) - torch.lgamma(a) - torch.lgamma(counts + 1)
        none = -a * torch.log1p(exposures / b)
        return combinations + none + torch.special.xlogy(counts, exposures / (b + exposures))
