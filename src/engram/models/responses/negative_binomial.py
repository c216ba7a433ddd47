"""Counts that vary more than a Poisson's."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from engram.core.errors import ArgumentError
from engram.models.responses.links import Link
from engram.models.responses.positive import PositiveMean


class NegativeBinomial(PositiveMean):
    """Counts with variance mu + overdispersion mu^2, the overdispersion known."""

    name = "negative_binomial"

    def __init__(self, overdispersion: float = 1.0, link: str | Link | None = None) -> None:
        super().__init__(link)
        if not (
            isinstance(overdispersion, Real)
            and math.isfinite(overdispersion)
            and overdispersion > 0
        ):
            raise ArgumentError(
                "a positive overdispersion",
                repr(overdispersion),
                "use the poisson response for 0; a link is the second argument",
            )
        self.overdispersion: float = float(overdispersion)

    def outside(self, targets: Tensor) -> Tensor:
        return targets < 0

    def support(self) -> str:
        return "not negative"

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

    def __repr__(self) -> str:
        return f"NegativeBinomial(overdispersion={self.overdispersion:g}, link={self.link!r})"
