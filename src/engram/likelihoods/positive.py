"""Targets whose mean is any positive number: counts, amounts and waiting times."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from engram.errors import ArgumentError
from engram.likelihoods.elementwise import ElementwiseLikelihood
from engram.likelihoods.links import Link

NOT_NEGATIVE, POSITIVE = "not negative", "positive"
ZERO_IN_THE_LIMIT = {0.0: -1.0}  # a mean comes to 0 as its logarithm goes to minus infinity


class PositiveMean(ElementwiseLikelihood):
    """A mean above zero: what such distributions share, whatever their variance."""

    default_link = "log"
    links: tuple[str, ...] = ("log", "identity", "sqrt", "inverse", "inverse_squared")

    def start(self, targets: Tensor) -> Tensor:
        centre = targets.mean()
        return (targets + torch.where(centre > 0, centre, 0.5)) / 2

    def inside(self, outputs: Tensor) -> Tensor:
        mean = self.link.mean(outputs)
        return (self.link.inside(outputs) & (mean > 0) & torch.isfinite(mean)).all(1)


class PowerVariance(PositiveMean):
    """Variance mu^power; every method but the constant."""

    has_dispersion = True
    power: float

    def outside(self, targets: Tensor) -> Tensor:
        return targets <= 0 if self.power >= 2 else targets < 0

    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
        if self.power == 1:
            return self.link.mean(eta) - targets * self.link.log_mean(eta)
        return self._kernel(self.link.mean(eta), targets)

    def _kernel(self, mean: Tensor, targets: Tensor) -> Tensor:
        power = self.power
        if power == 1:
            return mean - torch.special.xlogy(targets, mean)
        if power == 2:
            return targets / mean + mean.log()
        return mean ** (2 - power) / (2 - power) - targets * mean ** (1 - power) / (1 - power)

    def saturated(self, targets: Tensor) -> Tensor:
        if 1 < self.power < 2:
            return targets ** (2 - self.power) * (1 / (2 - self.power) - 1 / (1 - self.power))
        return self._kernel(targets, targets)

    def variance(self, mean: Tensor) -> Tensor:
        return mean**self.power

    def pull(self, eta: Tensor) -> Tensor:
        if self.link.name == "log":
            return ((1 - self.power) * eta).exp()
        return self.link.rise(eta) * self.link.mean(eta) ** (1 - self.power)

    def variance_growth(self, eta: Tensor) -> Tensor:
        return self.power * self.link.rise(eta)


class Poisson(PowerVariance):
    """Poisson: counts whose variance is their mean mu; outputs are log rates with the usual link.

    Args:
        link: ``log`` (usual), ``identity``, ``sqrt``, ``inverse``, ``inverse_squared`` or
            ``softplus``.
        dispersion: 1 for a Poisson distribution; another makes it a quasi-likelihood.

    Example:
        >>> Poisson().loss(torch.zeros(1, 1), torch.ones(1, 1))  # rate 1, one event
        tensor([1.])
    """

    name, has_dispersion, power = "poisson", False, 1.0
    canonical_link, links = "log", (*PositiveMean.links, "softplus")
    support, limits = NOT_NEGATIVE, ZERO_IN_THE_LIMIT

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        return torch.lgamma(targets + 1) / dispersion


class Gamma(PowerVariance):
    """Gamma: positive numbers with variance phi mu^2, such as amounts and waiting times.

    Args:
        link: ``log`` (usual), ``identity``, ``sqrt``, ``inverse`` or ``inverse_squared``.
        dispersion: phi, one over the shape of the distribution.

    Example:
        >>> Gamma().loss(torch.zeros(1, 1), torch.full((1, 1), 2.0))  # exponential with mean 1
        tensor([2.])
    """

    name, power, support = "gamma", 2.0, POSITIVE

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        shape = 1 / dispersion
        return torch.lgamma(shape) - shape * shape.log() - (shape - 1) * targets.log()


class InverseGaussian(PowerVariance):
    """Inverse Gaussian: positive numbers with variance phi mu^3, of a longer tail than a gamma's.

    Args:
        link: as for :class:`Gamma`.
        dispersion: phi.
    """

    name, power, support = "inverse_gaussian", 3.0, POSITIVE

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        spread = 0.5 * (2 * math.pi * dispersion * targets**3).log()
        return spread + 0.5 / (dispersion * targets)


class NegativeBinomial(PositiveMean):
    """Negative binomial: counts with variance mu + alpha mu^2, more than a Poisson's.

    Args:
        overdispersion: alpha, known, above 0.
        link: as for :class:`Gamma`.
        dispersion: 1 for the distribution itself; another makes it a quasi-likelihood.
    """

    name, support, limits = "negative_binomial", NOT_NEGATIVE, ZERO_IN_THE_LIMIT

    def __init__(
        self,
        overdispersion: float = 1.0,
        link: str | Link | None = None,
        dispersion: float = 1.0,
    ) -> None:
        super().__init__(link, dispersion)
        if not (
            isinstance(overdispersion, Real)
            and math.isfinite(overdispersion)
            and overdispersion > 0
        ):
            raise ArgumentError(
                "a positive overdispersion",
                repr(overdispersion),
                "use the poisson likelihood for 0; a link is the second argument",
            )
        self.overdispersion: float = float(overdispersion)

    def settings(self) -> dict[str, Any]:
        return {"overdispersion": self.overdispersion} | super().settings()

    def outside(self, targets: Tensor) -> Tensor:
        return targets < 0

    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
        return self._kernel(self.link.mean(eta), self.link.log_mean(eta), targets)

    def _kernel(self, mean: Tensor, log_mean: Tensor, targets: Tensor) -> Tensor:
        spread = torch.log1p(self.overdispersion * mean)
        odds = log_mean + math.log(self.overdispersion) - spread
        return spread / self.overdispersion - targets * odds

    def saturated(self, targets: Tensor) -> Tensor:
        some = targets.clamp(min=torch.finfo(targets.dtype).tiny)
        return self._kernel(targets, some.log(), targets)

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        size = 1 / self.overdispersion
        combinations = torch.lgamma(targets + size) - torch.lgamma(targets + 1) - math.lgamma(size)
        return -combinations / dispersion

    def variance(self, mean: Tensor) -> Tensor:
        return mean + self.overdispersion * mean.square()

    def pull(self, eta: Tensor) -> Tensor:
        return self.link.rise(eta) / (1 + self.overdispersion * self.link.mean(eta))

    def variance_growth(self, eta: Tensor) -> Tensor:
        spread = self.overdispersion * self.link.mean(eta)
        return self.link.rise(eta) * (1 + 2 * spread) / (1 + spread)
