r"""Classes with unknown probabilities.

.. math:: \pi \sim \mathrm{Dirichlet}(\alpha), \quad y \sim \mathrm{Categorical}(\pi), \quad
    T(\pi) = \log\pi, \quad \lambda = \alpha - 1, \quad \tilde\lambda = \text{one-hot}(y)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.errors import ArgumentError
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.reading import check_support, read_numbers, read_vector


@dataclass(frozen=True, eq=False)
class DirichletCategorical(Family):
    """Class probabilities with a Dirichlet prior; data are class numbers 0 to K - 1, one each.

    Args:
        alpha: prior counts, one per class.

    Example:
        >>> DirichletCategorical([1.0, 1.0, 1.0]).fit([0, 0, 2]).moments()["mean"]
        tensor([0.5000, 0.1667, 0.3333], dtype=torch.float64)
    """

    alpha: Sequence[float] | Tensor

    def __post_init__(self) -> None:
        alpha = read_vector(self.alpha, "alpha")
        if not (alpha > 0).all():
            raise ArgumentError("positive alpha", f"{float(alpha.min()):.4g}", "use a proper prior")
        object.__setattr__(self, "alpha", alpha)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.alpha)

    def read(self, data: Any) -> Observations:
        labels = read_numbers(data, "labels")
        inside = (labels >= 0) & (labels < self.num_classes) & (labels == labels.round())
        expected = f"class numbers from 0 to {self.num_classes - 1}"
        check_support(inside, labels, expected, "number the classes from 0, or add to alpha")
        return (labels.long(),)

    def prior(self) -> Named:
        return {"counts": torch.as_tensor(self.alpha) - 1}

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        (labels,) = observations
        ones = torch.ones(len(labels), dtype=torch.float64)
        return {"counts": equation.placed(ones, labels, self.num_classes)}

    def check(self, natural: Mapping[str, Tensor]) -> None:
        alpha = natural["counts"] + 1
        if not (alpha > 0).all():
            worst = int(alpha.argmin())
            raise improper(
                "a Dirichlet with positive alpha", f"{float(alpha[worst]):.4g} for class {worst}"
            )

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        return {"alpha": natural["counts"] + 1}

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        alpha = natural["counts"] + 1
        return torch.lgamma(alpha).sum() - torch.lgamma(alpha.sum())

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        alpha = natural["counts"] + 1
        mean = alpha / alpha.sum()
        return {"mean": mean, "variance": mean * (1 - mean) / (alpha.sum() + 1)}

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        (labels,) = observations
        alpha = natural["counts"] + 1
        return alpha[labels].log() - alpha.sum().log()

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        (labels,) = observations
        alpha = natural["counts"] + 1
        own, total = alpha[labels] - weights, alpha.sum() - weights
        check_cavities(own > 0)
        return own.log() - total.log()
