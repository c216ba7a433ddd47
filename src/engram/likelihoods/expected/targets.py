"""Targets of one output: their shape and their support."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.errors import TargetError


def one_number(mean: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Targets [N, 1] for outputs [N, 1]."""
    if mean.shape[1] != 1:
        raise TargetError(
            f"one output for the {kind} loss", f"{mean.shape[1]} outputs", "use one latent function"
        )
    numbers = targets[:, None] if targets.dim() == 1 else targets
    if numbers.shape != mean.shape:
        raise TargetError(
            f"one {kind} target per example, {len(mean)} in all",
            f"targets of shape {tuple(targets.shape)}",
            "give as many targets as inputs",
        )
    numbers = numbers.to(mean.dtype)
    if not torch.isfinite(numbers).all():
        raise TargetError("finite targets", "NaN or infinity", "clean the targets")
    return numbers


def signs(mean: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Labels -1 and 1, or 0 and 1, as signs [N, 1]."""
    labels = one_number(mean, targets, kind)
    zeros, minus = labels == 0, labels == -1
    if not ((labels == 1) | zeros | minus).all() or (zeros.any() and minus.any()):
        raise TargetError(
            f"labels -1 and 1, or 0 and 1, for the {kind} loss",
            f"values from {float(labels.min()):.4g} to {float(labels.max()):.4g}",
            "code the two classes as -1 and 1",
        )
    return torch.where(zeros, -1.0, labels)


def counts(mean: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Non-negative whole numbers [N, 1]."""
    numbers = one_number(mean, targets, kind)
    if ((numbers < 0) | (numbers != numbers.round())).any():
        raise TargetError(
            "non-negative whole counts",
            f"values from {float(numbers.min()):.4g} to {float(numbers.max()):.4g}",
            "check the targets",
        )
    return numbers
