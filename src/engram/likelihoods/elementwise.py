r"""Targets that are independent given the outputs: a distribution around a mean, through a link.

With the variance function :math:`v(\mu)`, the link :math:`\mu(\eta)` and the dispersion
:math:`\phi`, the loss of one target y has, whatever the link,

.. math:: e = \frac{\mu'}{\phi v} (\mu - y), \qquad \Lambda = \frac{\mu'}{\phi v}
    \Big[\mu' + (\mu - y) \Big(\frac{\mu''}{\mu'} - \frac{\mu' v'}{v}\Big)\Big],
    \qquad \mathbb{E}[\Lambda] = \frac{\mu'^2}{\phi v}

The bracket's second term vanishes for the canonical link only. An output is the predictor
:math:`\eta` of its own target, so :math:`\Lambda` is diagonal.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from engram.core.arguments import is_number
from engram.errors import ArgumentError, LikelihoodError, TargetError
from engram.likelihoods.base import ExpectedLoss, Likelihood, Recession
from engram.likelihoods.draws import Draws
from engram.likelihoods.links import LINKS, Link, link_named
from engram.likelihoods.quadrature import Quadrature
from engram.likelihoods.targets import like_outputs

Kind = TypeVar("Kind", bound="ElementwiseLikelihood")


class ElementwiseLikelihood(Likelihood):
    """A distribution of an exponential family with its link and dispersion; an output per target.

    Args:
        link: how the mean depends on the output, by name or as an object; the usual one if not
            given.
        dispersion: what the variance is multiplied by.

    Attributes:
        expected_hessian: whether Lambda is its expectation over targets, not the observed one.
    """

    default_link: str
    canonical_link: str | None = None  # with which the observed Lambda is the expected one
    links: tuple[str, ...]  # that its mean can have; a link object of another name is let through
    support: str  # the values that targets may have, in words
    # targets at an end of the support, and the sign of the output on the way there
    limits: ClassVar[Mapping[float, float]] = {}

    def __init__(self, link: str | Link | None = None, dispersion: float = 1.0) -> None:
        if not (is_number(dispersion) and 0 < dispersion < math.inf):
            raise LikelihoodError(
                "a positive dispersion", repr(dispersion), "use 1.0, or estimate it from residuals"
            )
        self.dispersion, self.expected_hessian = float(dispersion), False
        self.link = link_named(self.default_link if link is None else link)
        if self.link.name in LINKS and self.link.name not in self.links:
            raise ArgumentError(
                f"a link for a {self.name} likelihood: {', '.join(self.links)}",
                repr(self.link.name),
                f'use link="{self.default_link}"',
            )

    def at(self: Kind, dispersion: float, expected_hessian: bool) -> Kind:
        other = copy.copy(self)
        other.dispersion, other.expected_hessian = dispersion, expected_hessian
        return other

    # of one target, at dispersion 1: what a distribution says about itself

    @abstractmethod
    def outside(self, targets: Tensor) -> Tensor:
        """Targets outside the support."""

    @abstractmethod
    def start(self, targets: Tensor) -> Tensor:
        """Means for a fit to start from, inside the link's domain."""

    @abstractmethod
    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
        """The loss at dispersion 1, up to what does not depend on eta."""

    @abstractmethod
    def saturated(self, targets: Tensor) -> Tensor:
        """The kernel's smallest value, where the mean is the target."""

    @abstractmethod
    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        """What kernel / dispersion lacks to be a negative log likelihood; dispersion [N, 1].

        Where the distribution has no dispersion, any but 1 makes it a quasi-likelihood.
        """

    @abstractmethod
    def variance(self, mean: Tensor) -> Tensor:
        """The variance function v(mu)."""

    @abstractmethod
    def pull(self, eta: Tensor) -> Tensor:
        """mu' / v."""

    @abstractmethod
    def variance_growth(self, eta: Tensor) -> Tensor:
        """mu' v' / v."""

    @property
    def has_endless_limits(self) -> bool:
        """Whether the link comes to the limits only as the output goes to infinity."""
        return self.link.name == "log"

    def unit_residual(self, eta: Tensor, targets: Tensor) -> Tensor:
        """d loss / d eta at dispersion 1."""
        return self.pull(eta) * (self.link.mean(eta) - targets)

    def unit_curvature(self, eta: Tensor, targets: Tensor) -> Tensor:
        """d2 loss / d eta2 at dispersion 1, as observed."""
        excess = self.link.mean(eta) - targets
        bracket = self.link.bend(eta) - self.variance_growth(eta)
        return self.pull(eta) * (self.link.slope(eta) + excess * bracket)

    def expected_curvature(self, eta: Tensor) -> Tensor:
        """E[d2 loss / d eta2] at dispersion 1."""
        return self.pull(eta) * self.link.slope(eta)

    # of all outputs, at its dispersion: what every likelihood has

    @property
    def unit(self) -> str:
        """The unit of losses, nats unless they are no negative log likelihoods."""
        if self.has_dispersion or self.dispersion == 1:
            return "nats"
        return f"nats over a dispersion of {self.dispersion:.4g} (a quasi-likelihood)"

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = like_outputs(outputs, targets, self.name)
        wrong = self.outside(targets)
        if wrong.any():
            where = int(wrong.nonzero()[0, 0])
            value = float(targets[where][wrong[where]][0])
            raise TargetError(
                f"{self.name} targets that are {self.support}",
                f"{value:.6g} at position {where} of the batch ({int(wrong.sum())} such)",
                "check the coding of the targets, or choose another likelihood",
            )
        return targets

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets.to(outputs.dtype).reshape(outputs.shape)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.losses(outputs, self.form(outputs, targets)).sum(1)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of every output by itself, [N, K]."""
        constant = self.constant(targets, targets.new_full((), self.dispersion))
        return self.kernel(outputs, targets) / self.dispersion + constant

    def loss_statistics(self, outputs: Tensor) -> Tensor:
        # kernels are affine in the target, but for a part without eta: level and slope say it all.
        # In double precision, since both are large where targets are far from 0
        eta = outputs.double()
        level = self.kernel(eta, torch.zeros_like(eta))
        return torch.cat([level, self.kernel(eta, torch.ones_like(eta)) - level], dim=1)

    def loss_from_statistics(self, statistics: Tensor, targets: Tensor) -> Tensor:
        level, slope = statistics.chunk(2, dim=1)
        targets = self.form(level, targets)
        kernel = level + targets * slope + self.bent(targets)
        constant = self.constant(targets, targets.new_full((), self.dispersion))
        return (kernel / self.dispersion + constant).sum(1)

    def bent(self, targets: Tensor) -> Tensor:
        """The part of the kernel that is not affine in the target: it does not depend on eta."""
        return torch.zeros_like(targets)

    def loss_at(self, outputs: Tensor, targets: Tensor, precisions: Tensor) -> Tensor:
        """Negative log density where each example has the dispersion over its precision [N, 1].

        A likelihood without a dispersion has no such thing: its loss is per unit of weight. So is
        that of an example of weight 0, which would have none otherwise.
        """
        if not self.has_dispersion:
            precisions = torch.ones_like(precisions)
        dispersion = self.dispersion / torch.where(precisions > 0, precisions, 1.0)
        kernel = self.kernel(outputs, targets) / dispersion
        return (kernel + self.constant(targets, dispersion)).sum(1)

    def inside(self, outputs: Tensor) -> Tensor:
        return self.link.inside(outputs).all(1)

    def fitted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        constant = self.constant(targets, torch.ones_like(targets))
        return (self.kernel(outputs, targets) + constant).sum(1)

    def unit_deviance(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * (self.kernel(outputs, targets) - self.saturated(targets)).clamp(min=0)

    def starting_outputs(self, targets: Tensor) -> Tensor:
        return self.link.predictor(self.start(targets))

    def at_limit(self, targets: Tensor) -> Tensor:
        return (self._ways_out(targets) != 0).all(1)

    def recession(self, targets: Tensor) -> Recession | None:
        ways = self._ways_out(targets)
        if not (self.has_endless_limits and bool(ways.any())):
            return None
        return Recession(torch.diag_embed(ways), ways == 0)

    def _ways_out(self, targets: Tensor) -> Tensor:
        """The sign of the output that leads to a target at its limit, 0 for others, [N, K]."""
        ways = torch.zeros_like(targets)
        for limit, sign in self.limits.items():
            ways = torch.where(targets == limit, sign, ways)
        return ways

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.unit_residual(outputs, self.form(outputs, targets)) / self.dispersion

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The diagonal of Lambda, [N, K]; below 0 where the loss is not convex in f."""
        if self.expected_hessian or self.link.name == self.canonical_link:
            return self.expected_curvature(outputs) / self.dispersion
        return self.unit_curvature(outputs, self.form(outputs, targets)) / self.dispersion

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.diag_embed(self.hessian_diagonal(outputs, targets))

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return self.hessian_diagonal(outputs, targets) * vector

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # only the expectation is sure to have a root, whatever the link
        return torch.diag_embed((self.expected_curvature(outputs) / self.dispersion).sqrt())

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        # a sign has the covariance of a drawn target, and needs no inverse of its distribution
        root = (self.expected_curvature(outputs) / self.dispersion).sqrt()
        return draws.signs(outputs) * root

    def mean(self, outputs: Tensor) -> Tensor:
        return self.link.mean(outputs)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        return self.link.slope(outputs)

    def expectation(self) -> ExpectedLoss:
        return Quadrature(self)

    def settings(self) -> dict[str, Any]:
        """The arguments of this kind of likelihood, besides the link."""
        return {} if self.dispersion == 1 else {"dispersion": self.dispersion}

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        if self.expected_hessian or not self._has_known_link:
            return None
        usual = self.link.name == self.default_link
        return self.settings() | ({} if usual else {"link": self.link.name})

    @property
    def identity(self) -> str:
        """What is printed, which has all settings; a link of the user's own is compared too."""
        return repr(self) if self._has_known_link else super().identity

    @property
    def _has_known_link(self) -> bool:
        return self.link is LINKS.get(self.link.name)

    def __repr__(self) -> str:
        shown = {name: repr(value) for name, value in self.settings().items()}
        if self.link.name != self.default_link:
            shown["link"] = repr(self.link)
        if self.expected_hessian and self.link.name != self.canonical_link:
            shown["expected_hessian"] = "True"
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in shown.items())})"
