"""Responses whose mean is positive and may be any positive number."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.models.responses.base import Response


class PositiveMean(Response):
    """A mean above zero: what such responses share, whatever their variance."""

    default_link = "log"
    links = ("log", "identity", "sqrt", "inverse", "inverse_squared")

    def start(self, targets: Tensor) -> Tensor:
        centre = targets.mean()
        return (targets + torch.where(centre > 0, centre, 0.5)) / 2

    def inside(self, eta: Tensor) -> Tensor:
        mean = self.link.mean(eta)
        return self.link.inside(eta) & (mean > 0) & torch.isfinite(mean)
