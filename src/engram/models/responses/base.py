r"""Responses: what distribution a target has around its mean, and through which link.

With the variance function :math:`v(\mu)` and the link :math:`\mu(\eta)`, the loss of one target y
(a negative log likelihood at dispersion 1) has, whatever the link,

.. math:: e = \frac{\mu'}{v} (\mu - y), \qquad \Lambda = \frac{\mu'}{v}
    \Big[\mu' + (\mu - y) \Big(\frac{\mu''}{\mu'} - \frac{\mu' v'}{v}\Big)\Big],
    \qquad \mathbb{E}[\Lambda] = \frac{\mu'^2}{v}

The bracket's second term vanishes for the canonical link only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engram.core.errors import ArgumentError, TargetError
from engram.models.responses.links import LINKS, Link, link_named


class Response(ABC):
    """A distribution with its link; losses are per unit of weight, at dispersion 1."""

    name: str
    default_link: str
    links: tuple[str, ...]  # that its mean can have; a link object of another name is let through
    has_dispersion = False  # whether there is a scale to be estimated beside the mean

    def __init__(self, link: str | Link | None = None) -> None:
        self.link = link_named(self.default_link if link is None else link)
        if self.link.name in LINKS and self.link.name not in self.links:
            raise ArgumentError(
                f"a link for a {self.name} response: {', '.join(self.links)}",
                repr(self.link.name),
                f'use link="{self.default_link}"',
            )

    @abstractmethod
    def outside(self, targets: Tensor) -> Tensor:
        """Targets outside the support."""

    @abstractmethod
    def support(self) -> str:
        """The support in words."""

    @abstractmethod
    def start(self, targets: Tensor) -> Tensor:
        """Means to start from, inside the link's domain."""

    @abstractmethod
    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
        """The loss at dispersion 1, up to what does not depend on eta."""

    @abstractmethod
    def saturated(self, targets: Tensor) -> Tensor:
        """The kernel's smallest value, where the mean is the target."""

    @abstractmethod
    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        """What kernel / dispersion lacks to be a negative log likelihood; dispersion [N, 1].

        Where the response has none, another one than 1 makes it a quasi-likelihood.
        """

    def fitted(self, eta: Tensor, targets: Tensor) -> Tensor:
        """What a fit minimises: the loss at dispersion 1, but for a constant."""
        return self.kernel(eta, targets) + self.constant(targets, torch.ones_like(targets))

    def unit(self, dispersion: float) -> str:
        """Of losses: nats, or what they are where they are no negative log likelihoods."""
        if self.has_dispersion or dispersion == 1:
            return "nats"
        return f"nats over a dispersion of {dispersion:.4g} (a quasi-likelihood)"

    @abstractmethod
    def variance(self, mean: Tensor) -> Tensor:
        """v(mu)."""

    @abstractmethod
    def pull(self, eta: Tensor) -> Tensor:
        """mu' / v."""

    @abstractmethod
    def variance_growth(self, eta: Tensor) -> Tensor:
        """mu' v' / v."""

    def check(self, targets: Tensor) -> None:
        """TargetError unless all targets lie in the support."""
        wrong = self.outside(targets)
        if wrong.any():
            where = int(wrong.nonzero()[0, 0])
            raise TargetError(
                f"{self.name} targets that are {self.support()}",
                f"{float(targets[where]):.6g} for example {where} ({int(wrong.sum())} such)",
                "check the coding of the targets, or choose another response",
            )

    def inside(self, eta: Tensor) -> Tensor:
        """Where eta gives a mean in the interior of the support."""
        return self.link.inside(eta)

    def residual(self, eta: Tensor, targets: Tensor) -> Tensor:
        """e = d loss / d eta."""
        return self.pull(eta) * (self.link.mean(eta) - targets)

    def curvature(self, eta: Tensor, targets: Tensor) -> Tensor:
        """d2 loss / d eta2, as observed."""
        excess = self.link.mean(eta) - targets
        bracket = self.link.bend(eta) - self.variance_growth(eta)
        return self.pull(eta) * (self.link.slope(eta) + excess * bracket)

    def expected_curvature(self, eta: Tensor) -> Tensor:
        """E[d2 loss / d eta2]."""
        return self.pull(eta) * self.link.slope(eta)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(link={self.link!r})"
