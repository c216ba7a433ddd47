r"""Coin flips with an unknown probability of 1.

.. math:: \theta \sim \mathrm{Beta}(a, b), \quad y \sim \mathrm{Bernoulli}(\theta), \quad
    T(\theta) = (\log\theta, \log(1-\theta)), \quad \lambda = (a - 1, b - 1), \quad
    \tilde\lambda = (y, 1 - y)
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
from engram.families.reading import check_support, read_numbers, read_positive


@dataclass(frozen=True)
class BetaBernoulli(Family):
    """A probability with a Beta prior; data are labels 0 and 1, one per example.

    Args:
        a: prior count of ones.
        b: prior count of zeros.

    Example:
        >>> posterior = BetaBernoulli(1.0, 1.0).fit([1, 1, 0])
        >>> posterior.moments()["mean"]
        tensor(0.6000, dtype=torch.float64)
    """

    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        read_positive(self.a, "prior count a")
        read_positive(self.b, "prior count b")

    def read(self, data: Any) -> Observations:
        labels = read_numbers(data, "labels")
        check_support((labels == 0) | (labels == 1), labels, "labels 0 or 1", "code them so")
        return (labels,)

    def prior(self) -> Named:
        return {
            "ones": torch.tensor(self.a - 1.0, dtype=torch.float64),
            "zeros": torch.tensor(self.b - 1.0, dtype=torch.float64),
        }

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        (labels,) = observations
        return {"ones": equation.rows(labels), "zeros": equation.rows(1 - labels)}

    def check(self, natural: Mapping[str, Tensor]) -> None:
        a, b = self.standard(natural).values()
        if not (a > 0 and b > 0):
            raise improper("a Beta with positive a and b", f"a={float(a):.4g}, b={float(b):.4g}")

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        return {"a": natural["ones"] + 1, "b": natural["zeros"] + 1}

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        a, b = self.standard(natural).values()
        return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        a, b = self.standard(natural).values()
        mean = a / (a + b)
        return {"mean": mean, "variance": mean * (1 - mean) / (a + b + 1)}

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        (labels,) = observations
        a, b = self.standard(natural).values()
        return torch.where(labels == 1, a, b).log() - (a + b).log()

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        (labels,) = observations
        cavity = {
            "ones": natural["ones"] - weights * labels,
            "zeros": natural["zeros"] - weights * (1 - labels),
        }
        check_cavities((cavity["ones"] > -1) & (cavity["zeros"] > -1))
        return self.log_predictive(cavity, observations)
