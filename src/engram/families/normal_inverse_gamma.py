r"""Numbers with an unknown mean and an unknown variance.

.. math:: \sigma^2 \sim \mathrm{InvGamma}(a, b), \quad \mu \sim N(m, \sigma^2/\kappa), \quad
    y \sim N(\mu, \sigma^2)

With :math:`T = (\mu/\sigma^2, -1/(2\sigma^2), -\mu^2/(2\sigma^2), -\tfrac12\log\sigma^2)`, both
measured from an origin,

.. math:: \lambda = (\kappa m,\ 2b + \kappa m^2,\ \kappa,\ 2a + 3), \quad
    \tilde\lambda = (y, y^2, 1, 1)

The origin is the prior mean, or amid data that are far from it. Kept is :math:`\lambda` without the
prior's :math:`(\kappa_0 m_0, \kappa_0 m_0^2)`, whose size would hide the spread of such data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.densities import student_log_density
from engram.families.origin import origin_amid
from engram.families.reading import read_number, read_numbers, read_positive
from engram.families.scale_parts import SOME


@dataclass(frozen=True)
class NormalInverseGamma(Family):
    """A normal distribution of unknown mean and variance; data are numbers, one per example.

    Args:
        mean: m.
        kappa: prior number of examples behind the mean.
        a: prior shape of the variance; half the number of examples behind it.
        b: prior scale of the variance.
        origin: the number that squares are taken from; where not given the prior mean, or the mean
            of the data where these are far from it compared with their spread.

    Example:
        >>> NormalInverseGamma(0.0, 1.0, 2.0, 1.0).fit([1.0, 3.0]).standard()["mean"]
        tensor(1.3333, dtype=torch.float64)
    """

    mean: float = 0.0
    kappa: float = 1.0
    a: float = 1.0
    b: float = 1.0
    origin: float | None = None

    def __post_init__(self) -> None:
        read_number(self.mean, "mean")
        read_positive(self.kappa, "kappa")
        read_positive(self.a, "prior shape a")
        read_positive(self.b, "prior scale b")
        origin = self.mean if self.origin is None else self.origin
        read_number(origin, "origin")
        object.__setattr__(self, "origin", float(origin))

    def read(self, data: Any) -> Observations:
        return (read_numbers(data, "numbers"),)

    def prior(self) -> Named:
        values = {"sum": 0.0, "square": 2 * self.b, "count": self.kappa, "shape": 2 * self.a + 3}
        return {name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()}

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        centred = observations[0] - self._origin
        ones = equation.rows(torch.ones_like(centred))
        return {
            "sum": equation.rows(centred),
            "square": equation.rows(centred**2),
            "count": ones,
            "shape": ones,
        }

    def check(self, natural: Mapping[str, Tensor]) -> None:
        _, kappa, a, b = (float(value) for value in self.standard(natural).values())
        if not (kappa > 0 and a > 0 and b > 0):
            raise improper("positive kappa, a and b", f"kappa={kappa:.4g}, a={a:.4g}, b={b:.4g}")

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        total, count, ahead = natural["sum"], natural["count"], self.mean - self._origin
        number = count - self.kappa
        some = number > SOME * count
        safe = torch.where(some, number, 1.0)
        own = natural["square"] - total**2 / safe
        away = self.kappa * number / count * (total / safe - ahead) ** 2
        # without examples, or with more taken out than put in, there is no mean of theirs
        generic = natural["square"] + self.kappa * ahead**2
        generic = generic - (self.kappa * ahead + total) ** 2 / count
        return {
            "mean": self._origin + (self.kappa * ahead + total) / count,
            "kappa": count,
            "a": 0.5 * (natural["shape"] - 3),
            "b": 0.5 * torch.where(some, own + away, generic),
        }

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        _, kappa, a, b = self.standard(natural).values()
        return torch.lgamma(a) - a * b.log() - 0.5 * (kappa / (2 * math.pi)).log()

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        """The variance of the mean exists for a > 1, that of the variance for a > 2; else inf."""
        mean, kappa, a, b = self.standard(natural).values()
        infinite = torch.full_like(a, torch.inf)
        expected = torch.where(a > 1, b / (a - 1), infinite)
        spread = torch.where(a > 2, b**2 / ((a - 1) ** 2 * (a - 2)), infinite)
        return {
            "mean": mean,
            "variance": expected / kappa,
            "noise_mean": expected,
            "noise_variance": spread,
        }

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        _, kappa, a, b = self.standard(natural).values()
        ahead = self.kappa * (self.mean - self._origin)
        centre = (ahead + natural["sum"]) / kappa
        difference = (observations[0] - self._origin) - centre
        kappa_left, a_left = kappa - weights, a - 0.5 * weights
        gain = kappa / kappa_left
        # b as a downdate, not from the sums: those would cancel
        b_left = b - 0.5 * weights * gain * difference**2
        check_cavities((kappa_left > 0) & (a_left > 0) & (b_left > 0))
        scale = b_left * (kappa_left + 1) / (a_left * kappa_left)
        return student_log_density((gain * difference) ** 2 / scale, scale.log(), 2 * a_left, 1)

    def around(self, observations: Observations, weights: Tensor) -> Family:
        origin = torch.tensor([self._origin], dtype=torch.float64)
        amid = origin_amid(observations[0][:, None], weights, origin)
        return self if amid is origin else replace(self, origin=float(amid))

    def translated(self, natural: Named, source: Family) -> Named:
        assert isinstance(source, NormalInverseGamma)
        shift, total = source._origin - self._origin, natural["sum"]
        number = natural["count"] - source.kappa
        square = natural["square"] + 2 * shift * total + number * shift**2
        theirs, ours = source.mean - self._origin, self.mean - self._origin
        if source.kappa != self.kappa or theirs != ours:
            total = total + source.kappa * theirs - self.kappa * ours
            square = square + source.kappa * theirs**2 - self.kappa * ours**2
        return {**natural, "sum": total + number * shift, "square": square}

    @property
    def _origin(self) -> float:
        assert self.origin is not None
        return self.origin
