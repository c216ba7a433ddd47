"""Checks of covariance matrices, and of inputs at which a process is evaluated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.errors import DataError, NonFiniteError, PosteriorError
from engram.models.numbers import as_numbers


def as_points(inputs: Any, known: Tensor) -> Tensor:
    """Inputs [T, D] with as many columns as known ones [..., M, D], in their precision."""
    found = as_numbers("inputs", inputs)
    found = found[:, None] if found.dim() == 1 else found
    if found.dim() != 2 or found.shape[1] != known.shape[-1]:
        raise DataError(
            f"inputs [N, {known.shape[-1]}], as the model has them",
            f"shape {tuple(found.shape)}",
            "pass the same columns",
        )
    return found.to(known)


def checked_covariance(covariance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A symmetric positive semi-definite matrix with as many rows as targets."""
    covariance, targets = as_numbers("covariance", covariance), as_numbers("targets", targets)
    count = len(targets) if targets.dim() == 1 else 0
    if count == 0 or covariance.shape != (count, count):
        raise DataError(
            "a square covariance matrix with one row per target, targets [N]",
            f"shapes {tuple(covariance.shape)} and {tuple(targets.shape)}",
            "evaluate the kernel at the inputs of these targets",
        )
    if covariance.dtype not in (torch.float32, torch.float64):
        raise DataError(
            "a floating-point covariance, single or double", str(covariance.dtype), "use .double()"
        )
    targets = targets.to(covariance)
    for name, values in (("covariance", covariance), ("targets", targets)):
        if not torch.isfinite(values).all():
            raise NonFiniteError(f"a finite {name}", "NaN or infinity", "drop those examples")
    scale = float(covariance.diagonal().abs().max())
    slack = torch.finfo(covariance.dtype).eps ** 0.5 * scale
    asymmetry = float((covariance - covariance.T).abs().max())
    shifted = covariance + slack * torch.eye(count).to(covariance)
    failed = asymmetry > slack or bool(torch.linalg.cholesky_ex(shifted)[1])
    if failed or scale == 0:
        smallest = float(torch.linalg.eigvalsh((covariance + covariance.T) / 2)[0])
        raise PosteriorError(
            "a symmetric positive semi-definite covariance",
            f"smallest eigenvalue {smallest:.3g}, asymmetry {asymmetry:.3g}",
            "evaluate the kernel in float64, or add 1e-6 to its diagonal",
        )
    return covariance, targets
