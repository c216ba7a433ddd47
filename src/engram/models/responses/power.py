"""Variance mu^power: Poisson 1, Gamma 2, inverse Gaussian 3, Tweedie any."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from engram.core.errors import ArgumentError
from engram.models.responses.links import Link
from engram.models.responses.positive import PositiveMean
from engram.models.responses.tweedie_density import log_normaliser


class PowerVariance(PositiveMean):
    """Variance mu^power; every method but the constant."""

    has_dispersion = True
    power: float

    def outside(self, targets: Tensor) -> Tensor:
        return targets <= 0 if self.power >= 2 else targets < 0

    def support(self) -> str:
        return "positive" if self.power >= 2 else "not negative"

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
    """Counts with variance mu."""

    name, has_dispersion, power = "poisson", False, 1.0

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        return torch.lgamma(targets + 1) / dispersion


class Gamma(PowerVariance):
    """Positive numbers with variance dispersion mu^2."""

    name, power = "gamma", 2.0

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        shape = 1 / dispersion
        return torch.lgamma(shape) - shape * shape.log() - (shape - 1) * targets.log()


class InverseGaussian(PowerVariance):
    """Positive numbers with variance dispersion mu^3."""

    name, power = "inverse_gaussian", 3.0

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        spread = 0.5 * (2 * math.pi * dispersion * targets**3).log()
        return spread + 0.5 / (dispersion * targets)


class Tweedie(PowerVariance):
    """Any power of 1 or more.

    Between 1 and 2 the density is a series. With another power (for 2 and 3 see :class:`Gamma` and
    :class:`InverseGaussian`) there is none to hand: the loss is half the unit deviance over the
    dispersion, which gives the same estimates, and is called so.
    """

    name = "tweedie"

    def __init__(self, power: float = 1.5, link: str | Link | None = None) -> None:
        super().__init__(link)
        if not (isinstance(power, Real) and math.isfinite(power) and power >= 1):
            raise ArgumentError(
                "a power of 1 or more", repr(power), "use the gaussian response for power 0"
            )
        self.power = float(power)

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        if 1 < self.power < 2:
            return -log_normaliser(targets, dispersion, self.power)
        return -self.saturated(targets) / dispersion

    def fitted(self, eta: Tensor, targets: Tensor) -> Tensor:
        return self.kernel(eta, targets) - self.saturated(targets)

    def unit(self, dispersion: float) -> str:
        return "nats" if 1 < self.power < 2 else "half unit deviances over the dispersion"

    def __repr__(self) -> str:
        return f"Tweedie(power={self.power:g}, link={self.link!r})"
