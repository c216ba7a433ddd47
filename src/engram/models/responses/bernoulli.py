"""0/1 targets and shares of trials."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.models.responses.base import Response


class Bernoulli(Response):
    r"""0/1 targets, or shares of trials with the number of trials as weight.

    With :math:`a = \mu'/\mu` and :math:`b = \mu'/(1-\mu)`, which links give without cancellation:
    :math:`e = (1-y) b - y a` and, c being the bend,
    :math:`\Lambda = y\, a (a - c) + (1 - y)\, b (b + c)`.
    """

    name, default_link = "bernoulli", "logit"
    links = ("logit", "probit", "cloglog", "loglog", "cauchit", "log", "identity")

    def outside(self, targets: Tensor) -> Tensor:
        return (targets < 0) | (targets > 1)

    def support(self) -> str:
        return "0, 1 or a share between them"

    def start(self, targets: Tensor) -> Tensor:
        return (targets + 0.5) / 2

    def inside(self, eta: Tensor) -> Tensor:
        mean = self.link.mean(eta)
        return self.link.inside(eta) & (mean >= 0) & (mean <= 1)

    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
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

    def residual(self, eta: Tensor, targets: Tensor) -> Tensor:
        return (1 - targets) * self.link.fall(eta) - targets * self.link.rise(eta)

    def curvature(self, eta: Tensor, targets: Tensor) -> Tensor:
        rise, fall, bend = self.link.rise(eta), self.link.fall(eta), self.link.bend(eta)
        return targets * rise * (rise - bend) + (1 - targets) * fall * (fall + bend)

    def expected_curvature(self, eta: Tensor) -> Tensor:
        return self.link.rise(eta) * self.link.fall(eta)
