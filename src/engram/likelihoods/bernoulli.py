"""0/1 targets and shares of trials, and their loss averaged over a Gaussian output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.likelihoods.base import ExpectedLoss
from engram.likelihoods.draws import Draws
from engram.likelihoods.elementwise import ElementwiseLikelihood
from engram.likelihoods.quadrature import Quadrature
from engram.likelihoods.targets import signs

LINEAR_FROM = 40.0  # logit from which log(1 + exp(f)) is f: exp(-40) is below double precision


class Bernoulli(ElementwiseLikelihood):
    r"""Bernoulli: one logit for each 0/1 target, or share of trials (with the trials as weight).

    Args:
        link: ``logit`` (usual), ``probit``, ``cloglog``, ``loglog``, ``cauchit``, ``log`` or
            ``identity``.
        dispersion: 1 for the distribution itself; another makes it a quasi-likelihood.

    With :math:`a = \mu'/\mu` and :math:`b = \mu'/(1-\mu)`, which links give without cancellation:
    :math:`e = (1-y) b - y a` and, c being the bend,
    :math:`\Lambda = y\, a (a - c) + (1 - y)\, b (b + c)`.

    Example:
        >>> probit = Bernoulli(link="probit")
        >>> probit.loss(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([0.6931])
    """

    name, default_link, canonical_link = "bernoulli", "logit", "logit"
    links = ("logit", "probit", "cloglog", "loglog", "cauchit", "log", "identity")
    support = "between 0 and 1"
    limits: ClassVar[Mapping[float, float]] = {0.0: -1.0, 1.0: 1.0}

    def outside(self, targets: Tensor) -> Tensor:
        return (targets < 0) | (targets > 1)

    def start(self, targets: Tensor) -> Tensor:
        return (targets + 0.5) / 2

    def inside(self, outputs: Tensor) -> Tensor:
        mean = self.link.mean(outputs)
        return (self.link.inside(outputs) & (mean >= 0) & (mean <= 1)).all(1)

    @property
    def has_endless_limits(self) -> bool:
        return self.link.name not in ("log", "identity")

    @property
    def threshold(self) -> float | None:
        return float(self.link.predictor(torch.tensor(0.5, dtype=torch.float64)))

    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
        if self.link.name == "logit":
            return functional.softplus(eta, threshold=LINEAR_FROM) - targets * eta
        # a factor of 0 times log 0 is 0 here
        some = torch.where(targets > 0, targets * self.link.log_mean(eta), 0.0)
        none = torch.where(targets < 1, (1 - targets) * self.link.log_complement(eta), 0.0)
        return -(some + none)

    def saturated(self, targets: Tensor) -> Tensor:
        return -(
            torch.special.xlogy(targets, targets) + torch.special.xlogy(1 - targets, 1 - targets)
        )

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        return torch.zeros_like(targets)

    def variance(self, mean: Tensor) -> Tensor:
        return mean * (1 - mean)

    def pull(self, eta: Tensor) -> Tensor:
        return self.link.rise(eta) + self.link.fall(eta)  # mu' / (mu (1 - mu))

    def variance_growth(self, eta: Tensor) -> Tensor:
        return self.link.rise(eta) - self.link.fall(eta)

    def unit_residual(self, eta: Tensor, targets: Tensor) -> Tensor:
        return (1 - targets) * self.link.fall(eta) - targets * self.link.rise(eta)

    def unit_curvature(self, eta: Tensor, targets: Tensor) -> Tensor:
        rise, fall, bend = self.link.rise(eta), self.link.fall(eta), self.link.bend(eta)
        return targets * rise * (rise - bend) + (1 - targets) * fall * (fall + bend)

    def expected_curvature(self, eta: Tensor) -> Tensor:
        return self.link.rise(eta) * self.link.fall(eta)

    def target_probability(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        mean = self.mean(outputs)
        return (targets * mean + (1 - targets) * (1 - mean)).prod(1)

    def labels(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        if outputs.shape[1] != 1:  # several decisions in one example
            return None
        return (self.form(outputs, targets)[:, 0] > 0.5).long()

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        probability = self.link.mean(outputs)
        drawn = draws.uniform(probability.shape[1]).to(probability) < probability
        return self.unit_residual(outputs, drawn.to(outputs)) / self.dispersion**0.5

    def expectation(self) -> ExpectedLoss:
        return ExpectedBernoulli(self)


class ExpectedBernoulli(Quadrature):
    """E[-log p(y | f)] of labels 0 and 1, or -1 and 1; shares of trials too.

    All targets are seen at once here, so that labels of -1 cannot be mistaken.

    Example:
        >>> one = torch.ones(1, 1)
        >>> float(ExpectedBernoulli(Bernoulli("probit")).prediction(one, 3 * one))  # Phi(1 / 2)
        0.6914624...
    """

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if (targets == -1).any():
            targets = (signs(outputs, targets, self.name) + 1) / 2
        return super().prepare(outputs, targets)

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        if self.base.link.name == "probit":  # the average of Phi(f) is Phi again
            return self.base.loss(mean / (1 + variance).sqrt(), targets)
        return super().predictive_loss(mean, variance, targets)

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        if self.base.link.name == "probit":
            return self.base.mean(mean / (1 + variance).sqrt())
        return super().prediction(mean, variance)
