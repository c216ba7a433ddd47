"""A posterior that a caller passes: one of engram's, or what another library has fitted."""

from __future__ import annotations

from typing import Any

from torch import nn

from engram.core.errors import PosteriorError
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import from_laplace_torch, is_laplace_torch


def as_posterior(posterior: Any, model: nn.Module) -> Posterior:
    """The posterior itself, or one read off a fitted laplace-torch object, at these weights."""
    if is_laplace_torch(posterior):
        posterior = from_laplace_torch(posterior, model)
    if isinstance(posterior, Posterior):
        posterior.check_model(model)
        return posterior
    raise PosteriorError(
        "a Posterior, or a fitted laplace-torch object",
        type(posterior).__name__,
        "fit one with engram.laplace(model, data, ...)",
    )
