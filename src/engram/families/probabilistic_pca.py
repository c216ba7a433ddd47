r"""Vectors that are linear in a few hidden coordinates, plus equal noise in all directions.

.. math:: z \sim N(0, I_Q), \quad x \sim N(W z + \mu, \sigma^2 I_D)

The parameters :math:`(\mu, W, \sigma^2)` are those of the largest likelihood. They are a function
of sums over the examples, which play the part of the natural parameter, without a prior:

.. math:: \lambda = \sum_i (1, x_i, x_i x_i'), \quad
    A(\lambda) = \max_{\mu, W, \sigma} \sum_i \log p(x_i)

so that removing examples is a subtraction and one eigendecomposition. The divergence that A gives
is the log likelihood lost on the other's data by keeping these parameters (Cook's likelihood
displacement, halved).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.core.progress import progress_over
from engram.errors import ArgumentError, PosteriorError
from engram.families.base import Family, Observations, check_cavities
from engram.families.origin import origin_amid, translated_products
from engram.families.reading import read_vector, read_vectors

CHUNK_ENTRIES = 2**19  # numbers of matrices decomposed at once, 4 MB: more leave the cache
SMALLEST_NOISE = 1e-12  # share of the largest variance; less noise is rounding
SMALLEST_COUNT = 1e-9  # examples; fewer are what rounding leaves of none


@dataclass(frozen=True, eq=False)
class ProbabilisticPCA(Family):
    """Probabilistic principal components; data are vectors, one row per example, [N, D].

    It needs so many examples that they do not all lie in the plane of the components.

    Leave-one-out costs an eigendecomposition per example, O(N D^3).

    Args:
        size: D.
        num_components: Q, below D.
        origin: the point that products are taken from, [D], or a number for all entries: choose it
            in the range of the data; where these are far from it compared with their spread, their
            mean is taken.
        progress: whether a bar is shown when leave-one-out takes longer.

    Example:
        >>> points = [[3.0, 1.0], [-3.0, 1.0], [0.0, 2.0], [0.0, 0.0]]
        >>> ProbabilisticPCA(2, 1).fit(points).standard()["noise_variance"]
        tensor(0.5000, dtype=torch.float64)

    Reference:
        M. E. Tipping and C. M. Bishop, Probabilistic principal component analysis, 1999.
    """

    size: int
    num_components: int
    origin: float | Sequence[float] | Tensor = 0.0
    progress: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.num_components < self.size:
            raise ArgumentError(
                "0 < num_components < size",
                f"{self.num_components!r} and {self.size!r}",
                "use fewer components, so that some noise is left",
            )
        origin = read_vector(self.origin, "origin")
        if len(origin) not in (1, self.size):
            raise ArgumentError(f"an origin of {self.size} entries", str(len(origin)), "check it")
        object.__setattr__(self, "origin", origin.expand(self.size))

    def read(self, data: Any) -> Observations:
        return (read_vectors(data, "vectors", self.size),)

    def prior(self) -> Named:
        return {
            "count": torch.zeros((), dtype=torch.float64),
            "sum": torch.zeros(self.size, dtype=torch.float64),
            "outer": torch.zeros(self.size, self.size, dtype=torch.float64),
        }

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        centred = observations[0] - torch.as_tensor(self.origin)
        return {
            "count": equation.rows(torch.ones(len(centred), dtype=torch.float64)),
            "sum": equation.rows(centred),
            "outer": equation.products(centred, centred),
        }

    def check(self, natural: Mapping[str, Tensor]) -> None:
        if not natural["count"] > SMALLEST_COUNT:
            raise PosteriorError(
                "some data, since there is no prior", "none", "take out less, or fit to more"
            )
        values = torch.linalg.eigvalsh(self._covariance(natural)[1])
        rounding = SMALLEST_NOISE * float(natural["outer"].diagonal().sum() / natural["count"])
        noise = float(values[: -self.num_components].mean())
        if not (noise > rounding and float(values[0]) > -rounding):
            raise PosteriorError(
                "data that vary in more directions than there are components",
                f"noise variance {noise:.4g}",
                "take out less, use fewer components, or move the origin into the data",
            )

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        mean, covariance = self._covariance(natural)
        values, vectors = torch.linalg.eigh(covariance)
        noise = values[: -self.num_components].mean()
        axes = vectors[:, -self.num_components :].flip(1)
        # an eigenvector's sign is arbitrary: its largest entry is made positive
        largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
        lengths = (values[-self.num_components :].flip(0) - noise).clamp(min=0).sqrt()
        return {"mean": mean, "weights": axes * largest.sign() * lengths, "noise_variance": noise}

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        values = torch.linalg.eigvalsh(self._covariance(natural)[1])
        discarded = self.size - self.num_components
        noise = values[:discarded].mean()
        determinant = values[discarded:].log().sum() + discarded * noise.log()
        constant = self.size * (1 + math.log(2 * math.pi))
        return -0.5 * natural["count"] * (determinant + constant)

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        """Mean and variance of an example under the fitted model."""
        mean, weights, noise = self.standard(natural).values()
        identity = torch.eye(self.size, dtype=torch.float64)
        return {"mean": mean, "variance": weights @ weights.mT + noise * identity}

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        (points,) = observations
        values, vectors = torch.linalg.eigh(self._covariance(natural)[1])
        return self._log_density(
            self._from_mean(natural, points), values, vectors.expand(len(points), -1, -1)
        )

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        (points,) = observations
        covariance, count = self._covariance(natural)[1], natural["count"]
        left = count - weights
        check_cavities(left > SMALLEST_COUNT)
        difference = self._from_mean(natural, points)
        parts = []
        chunks = range(0, len(points), max(1, CHUNK_ENTRIES // self.size**2))
        for start in progress_over(chunks, "leave-one-out", self.progress):
            part = slice(start, start + chunks.step)
            own, gain = difference[part], (count / left[part])[:, None, None]
            share = (weights[part] / left[part])[:, None, None]
            downdate = share * own[:, :, None] * own[:, None, :]
            values, vectors = torch.linalg.eigh(gain * (covariance - downdate))
            noise = values[:, : -self.num_components].mean(1)
            check_cavities(noise > SMALLEST_NOISE * values[:, -1])
            parts.append(self._log_density(gain[:, 0] * own, values, vectors))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def around(self, observations: Observations, weights: Tensor) -> Family:
        origin = origin_amid(observations[0], weights, torch.as_tensor(self.origin))
        return self if origin is self.origin else replace(self, origin=origin)

    def translated(self, natural: Named, source: Family) -> Named:
        assert isinstance(source, ProbabilisticPCA)
        if source.num_components != self.num_components:
            raise ArgumentError(
                f"two models of {self.num_components} components",
                f"one of {source.num_components}",
                "compare models of one size",
            )
        shift = torch.as_tensor(source.origin) - torch.as_tensor(self.origin)
        return translated_products(natural, shift, natural["count"])

    def _covariance(self, natural: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the examples, divided by their number."""
        centre = natural["sum"] / natural["count"]
        covariance = natural["outer"] / natural["count"] - centre[:, None] * centre[None, :]
        return torch.as_tensor(self.origin) + centre, covariance

    def _from_mean(self, natural: Mapping[str, Tensor], points: Tensor) -> Tensor:
        """Points minus the mean, which by itself has no digits to spare far from 0."""
        return (points - torch.as_tensor(self.origin)) - natural["sum"] / natural["count"]

    def _log_density(self, difference: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        """log N(x; mu, W W' + noise) in the eigenbasis of the covariance, [M]."""
        discarded = self.size - self.num_components
        noise = values[..., :discarded].mean(-1)
        kept = values[..., discarded:]
        inside = (difference[:, None, :] @ vectors[..., discarded:])[:, 0] ** 2
        outside = ((difference[:, None, :] @ vectors[..., :discarded])[:, 0] ** 2).sum(-1)
        determinant = kept.log().sum(-1) + discarded * noise.log()
        square = (inside / kept).sum(-1) + outside / noise
        return -0.5 * (square + determinant + self.size * math.log(2 * math.pi))
