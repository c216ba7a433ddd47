"""Posteriors from other libraries: what is already fitted is taken as it is."""

from __future__ import annotations

from typing import Any

from torch import nn

from engram.core.errors import PosteriorError
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import from_laplace_torch, is_laplace_torch


def as_posterior(posterior: Any, model: nn.Module) -> Posterior:
    """The posterior itself, or one read off a fitted laplace-torch object."""
    if isinstance(posterior, Posterior):
        return posterior
    if is_laplace_torch(posterior):
        return from_laplace_torch(posterior, model)
    raise PosteriorError(
        "a Posterior, or a fitted laplace-torch object",
        type(posterior).__name__,
        "fit one with engram.laplace(model, data, ...)",
    )
