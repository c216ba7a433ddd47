r"""A mixture of Gaussians whose examples come with their responsibilities.

.. math:: \pi \sim \mathrm{Dirichlet}(\alpha), \quad (\mu_k, \Sigma_k) \sim \mathrm{NIW}, \quad
    \tilde\lambda_i = \big(r_{ik},\ r_{ik}\,(x_i, x_i x_i', 1, 1)\big)_{k=1..K}

Given the responsibilities :math:`r_i` the model is conjugate: a Dirichlet and a
normal-inverse-Wishart per component. An example that is predicted has none; its density is the
mixture of the components' Student densities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.errors import ArgumentError, DataError
from engram.families.base import Family, Observations, check_cavities
from engram.families.dirichlet_categorical import DirichletCategorical
from engram.families.normal_inverse_wishart import NormalInverseWishart
from engram.families.reading import check_lengths, check_support, read_pair, read_vectors

SUM_TOLERANCE = 1e-8  # by which the responsibilities of an example may miss 1, from rounding


@dataclass(frozen=True, eq=False)
class GaussianMixture(Family):
    """A mixture of Gaussians whose responsibilities are known, with conjugate priors.

    Data are a tuple (vectors [N, D], responsibilities [N, K]); vectors alone to predict.

    Args:
        alpha: prior counts of the K components.
        component: prior of each component.

    Example:
        >>> mixture = GaussianMixture([1.0, 1.0], NormalInverseWishart([0.0]))
        >>> fitted = mixture.fit(([[-2.0], [2.0], [2.5]], [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
        >>> fitted.moments()["mean"][:, 0]
        tensor([-1.0000,  1.5000], dtype=torch.float64)
    """

    alpha: Sequence[float] | Tensor
    component: NormalInverseWishart

    def __post_init__(self) -> None:
        if not isinstance(self.component, NormalInverseWishart):
            raise ArgumentError(
                "a NormalInverseWishart as prior of each component",
                type(self.component).__name__,
                "make one with the size of the vectors",
            )
        object.__setattr__(self, "alpha", DirichletCategorical(self.alpha).alpha)

    @property
    def proportions(self) -> DirichletCategorical:
        """The family of the component's probabilities."""
        return DirichletCategorical(self.alpha)

    @property
    def num_components(self) -> int:
        """K."""
        return len(self.alpha)

    def read(self, data: Any) -> Observations:
        vectors, shares = read_pair(data, "vectors", "responsibilities")
        (points,) = self.component.read(vectors)
        responsibilities = read_vectors(shares, "responsibilities", self.num_components)
        check_lengths(points, responsibilities, "vectors and responsibilities")
        inside = (responsibilities >= 0) & (responsibilities <= 1)
        check_support(inside, responsibilities, "responsibilities in [0, 1]", "normalise them")
        off = (responsibilities.sum(1) - 1).abs() > SUM_TOLERANCE
        if off.any():
            raise DataError(
                "responsibilities that sum to 1 for each example",
                f"{float(responsibilities.sum(1)[off][0]):.6g} at {int(off.nonzero()[0, 0])}",
                "divide each row by its sum",
            )
        return points, responsibilities

    def prior(self) -> Named:
        each = self.component.prior()
        spread = {n: v.expand(self.num_components, *v.shape).clone() for n, v in each.items()}
        return {**self.proportions.prior(), **spread}

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        points, responsibilities = observations
        sums = self.component.likelihoods((points,))
        each = {name: _by_component(total, responsibilities) for name, total in sums.items()}
        return {"counts": equation.rows(responsibilities), **each}

    def check(self, natural: Mapping[str, Tensor]) -> None:
        self.proportions.check(natural)
        self.component.check(natural)

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        return {**self.proportions.standard(natural), **self.component.standard(natural)}

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        return self.proportions.log_partition(natural) + self.component.log_partition(natural)

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        proportions = self.proportions.moments(natural)
        return {
            "proportion_mean": proportions["mean"],
            "proportion_variance": proportions["variance"],
            **self.component.moments(natural),
        }

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        points = observations[0]
        none = torch.zeros(len(points), self.num_components, dtype=torch.float64)
        return self.loo_log_predictive(natural, (points, none), none[:, 0])

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        points, responsibilities = observations
        held = (weights[:, None] * responsibilities).mT
        alpha = self.proportions.standard(natural)["alpha"][:, None] - held
        check_cavities((alpha > 0).all(0))
        densities = self.component.loo_log_predictive(natural, (points,), held)
        return torch.logsumexp(alpha.log() + densities, 0) - alpha.sum(0).log()

    def read_new(self, data: Any) -> Observations:
        return self.component.read(data)

    def around(self, observations: Observations, weights: Tensor) -> GaussianMixture:
        component = self.component.around(observations[:1], weights)
        assert isinstance(component, NormalInverseWishart)
        return self if component is self.component else replace(self, component=component)

    def translated(self, natural: Named, source: Family) -> Named:
        assert isinstance(source, GaussianMixture)
        return self.component.translated(natural, source.component)


def _by_component(total: WeightedSum, responsibilities: Tensor) -> WeightedSum:
    """The sum of one component's statistics, once per column of the responsibilities."""
    return lambda weights: torch.stack([total(weights * share) for share in responsibilities.T])
