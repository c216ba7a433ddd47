"""A covariance matrix that is one."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.errors import DataError, NonFiniteError, PosteriorError


def checked_covariance(covariance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A symmetric positive semi-definite matrix with as many rows as targets."""
    covariance = torch.as_tensor(covariance).detach()
    targets = torch.as_tensor(targets).detach()
    count = len(targets) if targets.dim() == 1 else 0
    if count == 0 or covariance.shape != (count, count):
        raise DataError(
            "a square covariance matrix with one row per target, targets [N]",
            f"shapes {tuple(covariance.shape)} and {tuple(targets.shape)}",
            "check the lengths",
        )
    if not covariance.is_floating_point():
        raise DataError("a floating-point covariance", str(covariance.dtype), "use .double()")
    targets = targets.to(covariance)
    for name, values in (("covariance", covariance), ("targets", targets)):
        if not torch.isfinite(values).all():
            raise NonFiniteError(f"a finite {name}", "NaN or infinity", "check the data")
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
            "check the kernel",
        )
    return covariance, targets
