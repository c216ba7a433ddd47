r"""A mixture of Gaussians whose responsibilities are fitted with it.

.. math:: r_{ik} \propto \exp \langle \tilde\lambda_k(x_i), \mathbb{E}_{q}[T] \rangle, \qquad
    \lambda = \lambda_0 + \sum_i \tilde\lambda(x_i, r_i)

The model is no longer conjugate, so removing is an estimate: the equation at the variational
posterior, where the natural gradient of an example is :math:`-\tilde\lambda(x_i, r_i)`, leaves the
responsibilities of the others as they are. :meth:`VariationalGaussianMixture.refit` is the truth.
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
from engram.core.progress import progress_over
from engram.core.selection import check_group
from engram.errors import ArgumentError, DataError, PosteriorError
from engram.families.base import Family, FamilyPosterior, Observations, check_proper, check_weights
from engram.families.gaussian_mixture import GaussianMixture


@dataclass(frozen=True, eq=False)
class VariationalGaussianMixture(Family):
    """A mixture of Gaussians by variational inference; data are vectors, one per row, [N, D].

    Args:
        mixture: prior of the proportions and of the components.
        seed: of the random starting points; the global random state is not used.
        tolerance: largest change of a responsibility in the last round.
        max_rounds: rounds after which it gives up.
        progress: whether a bar is shown when it takes longer.

    Example:
        >>> from engram.families import NormalInverseWishart
        >>> family = VariationalGaussianMixture(
        ...     GaussianMixture([1.0, 1.0], NormalInverseWishart([0.0]))
        ... )
        >>> fitted = family.fit([-3.0, -3.1, -2.9, 3.0, 3.1, 2.9])
        >>> fitted.observations[1].round().sum(0)
        tensor([3., 3.], dtype=torch.float64)
    """

    mixture: GaussianMixture
    seed: int = 0
    tolerance: float = 1e-10
    max_rounds: int = 10_000
    progress: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.mixture, GaussianMixture):
            raise ArgumentError(
                "a GaussianMixture as prior", type(self.mixture).__name__, "make one first"
            )

    def read(self, data: Any) -> Observations:
        return self.mixture.read_new(data)

    def prior(self) -> Named:
        return self.mixture.prior()

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        return self.mixture.likelihoods(observations)

    def check(self, natural: Mapping[str, Tensor]) -> None:
        self.mixture.check(natural)

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        return self.mixture.standard(natural)

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        return self.mixture.log_partition(natural)

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        return self.mixture.moments(natural)

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        return self.mixture.log_predictive(natural, observations)

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        return self.mixture.loo_log_predictive(natural, observations, weights)

    def translated(self, natural: Named, source: Family) -> Named:
        assert isinstance(source, VariationalGaussianMixture)
        return self.mixture.translated(natural, source.mixture)

    def fit(self, data: Any, weights: Sequence[float] | Tensor | None = None) -> FamilyPosterior:
        """Coordinate ascent from random centres to convergence; arguments as for any family."""
        (points,) = self.read(data)
        counted = check_weights(weights, len(points))
        if (counted < 0).any():
            raise DataError(
                "weights that are not negative",
                f"{float(counted.min()):.4g}",
                "use 0 to leave one out",
            )
        family = self.around((points,), counted)
        return family._ascend(points, counted, self._start(points))

    def refit(
        self,
        posterior: FamilyPosterior,
        indices: Sequence[int] | Tensor | None = None,
        weights: Sequence[float] | Tensor | None = None,
    ) -> FamilyPosterior:
        """Fit again without some examples: the truth that ``posterior.remove`` estimates.

        Coordinate ascent goes on from the responsibilities that the posterior has.

        Args:
            posterior: of this family.
            indices, weights: as for ``remove``.
        """
        left = posterior.remove(indices, weights).weights
        chosen, _ = check_group(indices, weights, posterior.num_data)
        if (left[chosen] < 0).any():
            raise PosteriorError(
                "weights that are not negative", "more taken out than was in", "take out less"
            )
        points, responsibilities = posterior.observations
        family = self.around((points,), left)
        return family._ascend(points, left, responsibilities)

    def around(self, observations: Observations, weights: Tensor) -> VariationalGaussianMixture:
        mixture = self.mixture.around(observations, weights)
        return self if mixture is self.mixture else replace(self, mixture=mixture)

    def _start(self, points: Tensor) -> Tensor:
        """Each example to the nearest of K centres, drawn far from one another (k-means++)."""
        generator = torch.Generator().manual_seed(self.seed)
        count = self.mixture.num_components
        if len(points) == 0:
            return points.new_zeros(0, count)
        centres = points[torch.randint(len(points), (1,), generator=generator)]
        while len(centres) < count:
            square = torch.cdist(points, centres).amin(1) ** 2
            chances = square if square.sum() > 0 else torch.ones_like(square)
            drawn = torch.multinomial(chances, 1, generator=generator)
            centres = torch.cat([centres, points[drawn]])
        nearest = torch.cdist(points, centres).argmin(1)
        return torch.nn.functional.one_hot(nearest, count).double()

    def _ascend(self, points: Tensor, weights: Tensor, start: Tensor) -> FamilyPosterior:
        responsibilities = start
        for _ in progress_over(range(self.max_rounds), "mixture", self.progress):
            likelihoods = self.mixture.likelihoods((points, responsibilities))
            natural = equation.divided(self.prior(), likelihoods, -weights)
            check_proper(self, natural)
            before, responsibilities = responsibilities, self._responsibilities(natural, points)
            change = float((responsibilities - before).abs().max()) if len(points) else 0.0
            if change <= self.tolerance:
                return FamilyPosterior(self, natural, (points, before), weights)
        raise PosteriorError(
            f"convergence within {self.max_rounds:,} rounds",
            f"responsibilities that still change by {change:.2g}",
            "raise max_rounds or tolerance, use fewer components or another seed",
        )

    def _responsibilities(self, natural: Named, points: Tensor) -> Tensor:
        """r_ik proportional to exp(E[log pi_k] + E[log N(x_i; mu_k, Sigma_k)])."""
        alpha = self.mixture.proportions.standard(natural)["alpha"]
        size = points.shape[1]
        kappa, dof = natural["count"], natural["shape"] - size - 2
        square, spread = self.mixture.component.whitened(natural, points)
        halves = 0.5 * (dof[:, None] - torch.arange(size))
        # log 2 and log 2 pi are the same for all components
        constant = torch.digamma(alpha) + 0.5 * (torch.digamma(halves).sum(-1) - spread)
        fit = 0.5 * (size / kappa + dof * square.mT)
        return torch.softmax(constant - fit, 1)
