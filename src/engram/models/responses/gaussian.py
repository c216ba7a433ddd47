"""Any number, with constant variance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram.models.responses.base import Response
from engram.models.responses.links import LINKS


class Gaussian(Response):
    """Any number, constant variance."""

    name, default_link, has_dispersion = "gaussian", "identity", True
    links = tuple(LINKS)

    def outside(self, targets: Tensor) -> Tensor:
        return torch.zeros_like(targets, dtype=torch.bool)

    def support(self) -> str:
        return "any number"

    def start(self, targets: Tensor) -> Tensor:
        if self.link.name == "identity":
            return targets
        return targets.clamp(min=0.1 * float(targets.abs().mean()) + 1e-8)

    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (self.link.mean(eta) - targets).square()

    def saturated(self, targets: Tensor) -> Tensor:
        return torch.zeros_like(targets)

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        return 0.5 * (2 * math.pi * dispersion).log().expand_as(targets)

    def variance(self, mean: Tensor) -> Tensor:
        return torch.ones_like(mean)

    def pull(self, eta: Tensor) -> Tensor:
        return self.link.slope(eta)

    def variance_growth(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)
