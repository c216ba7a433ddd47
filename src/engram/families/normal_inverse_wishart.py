r"""Vectors with an unknown mean and an unknown covariance.

.. math:: \Sigma \sim \mathrm{InvWishart}(\nu, \Psi), \quad \mu \sim N(m, \Sigma/\kappa), \quad
    x \sim N(\mu, \Sigma)

With :math:`T = (\Sigma^{-1}\mu, -\tfrac12\Sigma^{-1}, -\tfrac12\mu'\Sigma^{-1}\mu,
-\tfrac12\log|\Sigma|)`, measured from an origin, in D dimensions

.. math:: \lambda = (\kappa m,\ \Psi + \kappa m m',\ \kappa,\ \nu + D + 2), \quad
    \tilde\lambda = (x, x x', 1, 1)

The origin is the prior mean, or amid data that are far from it. Kept is :math:`\lambda` without the
prior's :math:`(\kappa_0 m_0, \kappa_0 m_0 m_0')`, whose size would hide the spread of such data.
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
from engram.errors import ArgumentError
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.densities import student_log_density
from engram.families.origin import origin_amid, translated_products
from engram.families.reading import read_covariance, read_positive, read_vector, read_vectors
from engram.families.scale_parts import ScaleParts, scale_parts


@dataclass(frozen=True, eq=False)
class NormalInverseWishart(Family):
    """A normal distribution of unknown mean and covariance; data are vectors, one per row, [N, D].

    Its methods take natural parameters with leading dimensions too, as a mixture has them.

    Args:
        mean: m [D].
        kappa: prior number of examples behind the mean.
        dof: nu, above D - 1; prior number of examples behind the covariance.
        scale: Psi [D, D], or a number for its multiple of the identity.
        origin: the point that products are taken from, [D]; where not given the prior mean, or the
            mean of the data where these are far from it compared with their spread.

    Example:
        >>> posterior = NormalInverseWishart([0.0, 0.0]).fit([[1.0, 2.0], [3.0, 4.0]])
        >>> posterior.standard()["mean"]
        tensor([1.3333, 2.0000], dtype=torch.float64)
    """

    mean: Sequence[float] | Tensor
    kappa: float = 1.0
    dof: float | None = None
    scale: float | Tensor = 1.0
    origin: Sequence[float] | Tensor | None = None

    def __post_init__(self) -> None:
        mean = read_vector(self.mean, "mean")
        dof = len(mean) + 2.0 if self.dof is None else read_positive(self.dof, "dof")
        if dof <= len(mean) - 1:
            raise ArgumentError(
                f"dof above {len(mean) - 1}, one less than the dimensions",
                repr(self.dof),
                "leave it out for D + 2, or use a larger one",
            )
        read_positive(self.kappa, "kappa")
        origin = mean if self.origin is None else read_vector(self.origin, "origin")
        if len(origin) != len(mean):
            raise ArgumentError(
                f"an origin of {len(mean)} entries", str(len(origin)), "as the mean"
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "dof", dof)
        object.__setattr__(self, "origin", origin)
        object.__setattr__(self, "scale", read_covariance(self.scale, "scale", len(mean)))

    @property
    def size(self) -> int:
        """D."""
        return len(self.mean)

    def read(self, data: Any) -> Observations:
        return (read_vectors(data, "vectors", self.size),)

    def prior(self) -> Named:
        assert self.dof is not None
        return {
            "sum": torch.zeros(self.size, dtype=torch.float64),
            "outer": torch.as_tensor(self.scale).clone(),
            "count": torch.tensor(self.kappa, dtype=torch.float64),
            "shape": torch.tensor(self.dof + self.size + 2, dtype=torch.float64),
        }

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        centred = observations[0] - torch.as_tensor(self.origin)
        ones = equation.rows(torch.ones(len(centred), dtype=torch.float64))
        return {
            "sum": equation.rows(centred),
            "outer": equation.products(centred, centred),
            "count": ones,
            "shape": ones,
        }

    def check(self, natural: Mapping[str, Tensor]) -> None:
        kappa, dof = natural["count"], natural["shape"] - self.size - 2
        if not ((kappa > 0).all() and (dof > self.size - 1).all()):
            raise improper(
                f"positive kappa and dof above {self.size - 1}",
                f"kappa={float(kappa.min()):.4g}, dof={float(dof.min()):.4g}",
            )
        if (torch.linalg.cholesky_ex(self._parts(natural).base).info != 0).any():
            raise improper("a positive definite scale matrix", "one that is not")

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        parts = self._parts(natural)
        return {
            "mean": torch.as_tensor(self.origin) + parts.centre + parts.pulled,
            "kappa": natural["count"],
            "dof": natural["shape"] - self.size - 2,
            "scale": parts.scale,
        }

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        kappa, dof = natural["count"], natural["shape"] - self.size - 2
        gammas = 0.5 * dof * self.size * math.log(2) + torch.mvlgamma(0.5 * dof, self.size)
        determinant = self._parts(natural).log_determinant()
        spread = 0.5 * (dof * determinant + self.size * (kappa / (2 * math.pi)).log())
        return (gammas - spread).sum()

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        """Infinite where they do not exist: E[Sigma] needs dof > D + 1, its variance D + 3."""
        mean, kappa, dof, scale = self.standard(natural).values()
        infinite = torch.full_like(scale, torch.inf)
        beyond = (dof - self.size - 1)[..., None, None]
        expected = torch.where(beyond > 0, scale / beyond, infinite)
        diagonal = scale.diagonal(dim1=-2, dim2=-1)
        squares = diagonal[..., :, None] * diagonal[..., None, :]
        numerator = (beyond + 2) * scale**2 + beyond * squares
        spread = numerator / ((beyond + 1) * beyond**2 * (beyond - 2))
        return {
            "mean": mean,
            "variance": expected / kappa[..., None, None],
            "noise_mean": expected,
            "noise_variance": torch.where(beyond > 2, spread, infinite),
        }

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        """A rank-one downdate of the scale for each example; leading dimensions give [..., N]."""
        (points,) = observations
        square, log_determinant = self.whitened(natural, points)
        kappa, dof = natural["count"][..., None], (natural["shape"] - self.size - 2)[..., None]
        kappa_left, dof_left = kappa - weights, dof - weights - self.size + 1
        gain = kappa / kappa_left
        kept = 1 - weights * gain * square
        check_cavities((kappa_left > 0) & (dof_left > 0) & (kept > 0))
        inflation = (kappa_left + 1) / (kappa_left * dof_left)
        determinant = log_determinant[..., None] + kept.log()
        return student_log_density(
            gain**2 * square / kept / inflation,
            determinant + self.size * inflation.log(),
            dof_left,
            self.size,
        )

    def around(self, observations: Observations, weights: Tensor) -> Family:
        origin = origin_amid(observations[0], weights, torch.as_tensor(self.origin))
        return self if origin is self.origin else replace(self, origin=origin)

    def translated(self, natural: Named, source: Family) -> Named:
        assert isinstance(source, NormalInverseWishart)
        here, there = torch.as_tensor(self.origin), torch.as_tensor(source.origin)
        moved = translated_products(natural, there - here, natural["count"] - source.kappa)
        theirs, ours = torch.as_tensor(source.mean) - here, torch.as_tensor(self.mean) - here
        if source.kappa == self.kappa and bool((theirs == ours).all()):
            return moved
        total = source.kappa * theirs - self.kappa * ours
        outer = source.kappa * torch.outer(theirs, theirs) - self.kappa * torch.outer(ours, ours)
        return {**moved, "sum": moved["sum"] + total, "outer": moved["outer"] + outer}

    def whitened(self, natural: Mapping[str, Tensor], points: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`(x - m)'\Psi^{-1}(x - m)` of every point, [..., N], and log |Psi|, [...]."""
        return self._parts(natural).whitened(points - torch.as_tensor(self.origin))

    def _parts(self, natural: Mapping[str, Tensor]) -> ScaleParts:
        ahead = torch.as_tensor(self.mean) - torch.as_tensor(self.origin)
        return scale_parts(natural, self.kappa, ahead)
