"""Targets of every loss: their shape, and the values that they may have."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.errors import TargetError

SUM_TOLERANCE = 1e-4  # by which the probabilities of an example may miss 1: those of float16 do


def check_numbers(targets: Tensor, kind: str) -> None:
    """TargetError if a target is NaN or infinite."""
    bad = ~targets.isfinite().reshape(len(targets), -1).all(1)
    if bad.any():
        where = int(bad.nonzero()[0])
        raise TargetError(
            f"finite {kind} targets",
            f"NaN or infinity at position {where} of the batch",
            "drop the examples without a target",
        )


def like_outputs(outputs: Tensor, targets: Tensor, kind: str) -> Tensor:
    """One finite number for each output [N, K]; [N] will do for one output."""
    if targets.dim() == 1 and outputs.shape[1] == 1:
        targets = targets[:, None]
    if targets.shape != outputs.shape:
        raise TargetError(
            f"{kind} targets of the outputs' shape {tuple(outputs.shape)}",
            f"shape {tuple(targets.shape)}",
            "give one number per output and example",
        )
    check_numbers(targets, kind)
    return targets.to(outputs.dtype)


def signs(outputs: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Labels -1 and 1, or 0 and 1, of all examples, as signs of the outputs' shape."""
    labels = like_outputs(outputs, targets, kind)
    zeros, minus = labels == 0, labels == -1
    if not ((labels == 1) | zeros | minus).all() or (zeros.any() and minus.any()):
        raise TargetError(
            f"labels -1 and 1, or 0 and 1, for the {kind} loss",
            f"values from {float(labels.min()):.4g} to {float(labels.max()):.4g}",
            "code the two classes as -1 and 1",
        )
    return torch.where(zeros, -1.0, labels)


def classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """Class numbers [N], or the probabilities of the K classes of each example [N, K]."""
    num_outputs = outputs.shape[1]
    if num_outputs < 2:
        raise TargetError(
            "at least 2 outputs for the categorical likelihood",
            f"{num_outputs} output",
            'use likelihood="bernoulli" for a model with one logit',
        )
    if targets.is_floating_point():
        return _probabilities(outputs, targets)
    if targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.dim() != 1 or targets.dtype == torch.bool:
        raise TargetError(
            "one integer class number per example, [N], or soft float targets [N, K]",
            f"{targets.dtype} of shape {tuple(targets.shape)}",
            "give class numbers as int64, or probabilities as float",
        )
    outside = (targets < 0) | (targets >= num_outputs)
    if outside.any():
        where = int(outside.nonzero()[0])
        raise TargetError(
            f"class numbers from 0 to {num_outputs - 1}",
            f"{int(targets[where])} at position {where} of the batch",
            "renumber the classes, or give the model as many outputs as there are classes",
        )
    return targets.long()


def _probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.shape != outputs.shape:
        raise TargetError(
            f"integer class numbers [N], or soft targets of shape {tuple(outputs.shape)}",
            f"{targets.dtype} targets of shape {tuple(targets.shape)}",
            "convert class numbers with .long()",
        )
    check_numbers(targets, "soft")
    targets = targets.to(outputs.dtype)
    total = targets.sum(1)
    near = torch.allclose(total, torch.ones_like(total), atol=SUM_TOLERANCE)
    if (targets < 0).any() or not near:
        raise TargetError(
            "soft targets that are non-negative and sum to 1 in every row",
            f"rows that sum to {float(total.min()):.4g} to {float(total.max()):.4g}",
            "divide every row by its sum",
        )
    return targets
