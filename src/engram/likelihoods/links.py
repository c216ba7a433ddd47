r"""Links: the mean of a target as a function of the linear predictor, :math:`\mu(\eta)`.

Every link gives the mean, its slope :math:`\mu'` and the bend :math:`\mu''/\mu'`; what a likelihood
divides by, :math:`\mu'/\mu` and :math:`\mu'/(1-\mu)`, is given directly where the quotient of the
two would be 0/0 far out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engram.errors import ArgumentError

LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)  # minus the log density of a normal at 0
FAR_BELOW = -36.0  # where log(1 + exp(eta)) is exp(eta) to double precision


class Link(ABC):
    """A monotone map between the mean and the linear predictor."""

    name: str

    @abstractmethod
    def predictor(self, mean: Tensor) -> Tensor:
        """eta of a mean."""

    @abstractmethod
    def mean(self, eta: Tensor) -> Tensor:
        """mu(eta)."""

    @abstractmethod
    def slope(self, eta: Tensor) -> Tensor:
        """mu'(eta)."""

    @abstractmethod
    def bend(self, eta: Tensor) -> Tensor:
        """mu''(eta) / mu'(eta)."""

    def inside(self, eta: Tensor) -> Tensor:
        """Where the link is defined and monotone."""
        return torch.isfinite(eta)

    def rise(self, eta: Tensor) -> Tensor:
        """mu' / mu."""
        return self.slope(eta) / self.mean(eta)

    def fall(self, eta: Tensor) -> Tensor:
        """mu' / (1 - mu)."""
        return self.slope(eta) / (1 - self.mean(eta))

    def log_mean(self, eta: Tensor) -> Tensor:
        """log mu."""
        return self.mean(eta).log()

    def log_complement(self, eta: Tensor) -> Tensor:
        """log (1 - mu)."""
        return torch.log1p(-self.mean(eta))

    def __repr__(self) -> str:
        return self.name


class Identity(Link):
    """mu = eta."""

    name = "identity"

    def predictor(self, mean: Tensor) -> Tensor:
        return mean

    def mean(self, eta: Tensor) -> Tensor:
        return eta

    def slope(self, eta: Tensor) -> Tensor:
        return torch.ones_like(eta)

    def bend(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)


class Log(Link):
    """mu = exp(eta)."""

    name = "log"

    def predictor(self, mean: Tensor) -> Tensor:
        return mean.log()

    def mean(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def slope(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def bend(self, eta: Tensor) -> Tensor:
        return torch.ones_like(eta)

    def rise(self, eta: Tensor) -> Tensor:
        return torch.ones_like(eta)

    def log_mean(self, eta: Tensor) -> Tensor:
        return eta


class Softplus(Link):
    """mu = log(1 + exp(eta)): GPyTorch's link for counts."""

    name = "softplus"

    def predictor(self, mean: Tensor) -> Tensor:
        return mean + torch.log(-torch.expm1(-mean))

    def mean(self, eta: Tensor) -> Tensor:
        return torch.nn.functional.softplus(eta)

    def slope(self, eta: Tensor) -> Tensor:
        return eta.sigmoid()

    def bend(self, eta: Tensor) -> Tensor:
        return (-eta).sigmoid()

    def rise(self, eta: Tensor) -> Tensor:
        low = eta < FAR_BELOW
        return torch.where(low, 1.0, self.slope(eta) / torch.where(low, 1.0, self.mean(eta)))

    def log_mean(self, eta: Tensor) -> Tensor:
        # log softplus(f) tends to f far below zero, where softplus itself underflows
        low = eta < FAR_BELOW
        return torch.where(low, eta, torch.where(low, 1.0, self.mean(eta)).log())


class PowerLink(Link):
    """mu = eta^exponent for positive eta: inverse (-1), inverse_squared (-1/2), sqrt (2)."""

    def __init__(self, name: str, exponent: float) -> None:
        self.name, self.exponent = name, exponent

    def predictor(self, mean: Tensor) -> Tensor:
        return mean ** (1 / self.exponent)

    def mean(self, eta: Tensor) -> Tensor:
        return eta**self.exponent

    def slope(self, eta: Tensor) -> Tensor:
        return self.exponent * eta ** (self.exponent - 1)

    def bend(self, eta: Tensor) -> Tensor:
        return (self.exponent - 1) / eta

    def rise(self, eta: Tensor) -> Tensor:
        return self.exponent / eta

    def inside(self, eta: Tensor) -> Tensor:
        return torch.isfinite(eta) & (eta > 0)


class Logit(Link):
    """mu = 1 / (1 + exp(-eta))."""

    name = "logit"

    def predictor(self, mean: Tensor) -> Tensor:
        return torch.logit(mean)

    def mean(self, eta: Tensor) -> Tensor:
        return eta.sigmoid()

    def slope(self, eta: Tensor) -> Tensor:
        return eta.sigmoid() * (-eta).sigmoid()

    def bend(self, eta: Tensor) -> Tensor:
        return (-eta).sigmoid() - eta.sigmoid()

    def rise(self, eta: Tensor) -> Tensor:
        return (-eta).sigmoid()

    def fall(self, eta: Tensor) -> Tensor:
        return eta.sigmoid()

    def log_mean(self, eta: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(eta)

    def log_complement(self, eta: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(-eta)


class Probit(Link):
    """mu = Phi(eta), the normal distribution function."""

    name = "probit"

    def predictor(self, mean: Tensor) -> Tensor:
        return torch.special.ndtri(mean)

    def mean(self, eta: Tensor) -> Tensor:
        return torch.special.ndtr(eta)

    def slope(self, eta: Tensor) -> Tensor:
        return self._log_density(eta).exp()

    def bend(self, eta: Tensor) -> Tensor:
        return -eta

    def rise(self, eta: Tensor) -> Tensor:
        return (self._log_density(eta) - self.log_mean(eta)).exp()

    def fall(self, eta: Tensor) -> Tensor:
        return (self._log_density(eta) - self.log_complement(eta)).exp()

    def log_mean(self, eta: Tensor) -> Tensor:
        return torch.special.log_ndtr(eta)

    def log_complement(self, eta: Tensor) -> Tensor:
        return torch.special.log_ndtr(-eta)

    @staticmethod
    def _log_density(eta: Tensor) -> Tensor:
        return -0.5 * eta.square() - LOG_ROOT_TWO_PI


class Cloglog(Link):
    """mu = 1 - exp(-exp(eta)), the complementary log-log link."""

    name = "cloglog"

    def predictor(self, mean: Tensor) -> Tensor:
        return (-torch.log1p(-mean)).log()

    def mean(self, eta: Tensor) -> Tensor:
        return -torch.expm1(-eta.exp())

    def slope(self, eta: Tensor) -> Tensor:
        return (eta - eta.exp()).exp()

    def bend(self, eta: Tensor) -> Tensor:
        return 1 - eta.exp()

    def rise(self, eta: Tensor) -> Tensor:
        return eta.exp() / torch.expm1(eta.exp())

    def fall(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def log_complement(self, eta: Tensor) -> Tensor:
        return -eta.exp()


class Loglog(Link):
    """mu = exp(-exp(-eta)), the log-log link."""

    name = "loglog"

    def predictor(self, mean: Tensor) -> Tensor:
        return -(-mean.log()).log()

    def mean(self, eta: Tensor) -> Tensor:
        return (-(-eta).exp()).exp()

    def slope(self, eta: Tensor) -> Tensor:
        return (-eta - (-eta).exp()).exp()

    def bend(self, eta: Tensor) -> Tensor:
        return (-eta).exp() - 1

    def rise(self, eta: Tensor) -> Tensor:
        return (-eta).exp()

    def fall(self, eta: Tensor) -> Tensor:
        return (-eta).exp() / torch.expm1((-eta).exp())

    def log_mean(self, eta: Tensor) -> Tensor:
        return -(-eta).exp()

    def log_complement(self, eta: Tensor) -> Tensor:
        return (-torch.expm1(-(-eta).exp())).log()


class Cauchit(Link):
    """mu = 1/2 + arctan(eta) / pi."""

    name = "cauchit"

    def predictor(self, mean: Tensor) -> Tensor:
        return torch.tan(math.pi * (mean - 0.5))

    def mean(self, eta: Tensor) -> Tensor:
        return 0.5 + eta.atan() / math.pi

    def slope(self, eta: Tensor) -> Tensor:
        return 1 / (math.pi * (1 + eta.square()))

    def bend(self, eta: Tensor) -> Tensor:
        return -2 * eta / (1 + eta.square())


LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        *(Identity(), Log(), Softplus(), Logit(), Probit(), Cloglog(), Loglog(), Cauchit()),
        *(PowerLink("inverse", -1.0), PowerLink("inverse_squared", -0.5), PowerLink("sqrt", 2.0)),
    )
}


def link_named(link: str | Link) -> Link:
    """The link with this name; a link object stands for itself."""
    if isinstance(link, Link):
        return link
    if isinstance(link, str) and link in LINKS:
        return LINKS[link]
    raise ArgumentError(
        f"link to be one of {', '.join(LINKS)}, or a Link object", repr(link), 'use link="log"'
    )
