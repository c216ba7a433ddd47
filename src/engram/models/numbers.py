"""Arrays that a caller gives, as tensors of real numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.errors import DataError, NonFiniteError


def as_numbers(name: str, values: Any) -> Tensor:
    """A tensor of real numbers; DataError for all else."""
    try:
        found = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} as numbers", type(values).__name__, "pass a tensor or an array"
        ) from error
    if found.is_complex():
        raise DataError(f"a {name} of real numbers", str(found.dtype), "pass a floating-point one")
    return found.detach()


def checked_inputs(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Finite floating-point inputs [N, D] with as many targets."""
    inputs, targets = as_numbers("inputs", inputs), as_numbers("targets", targets)
    single_or_double = inputs.dtype in (torch.float32, torch.float64)
    if inputs.dim() != 2 or not single_or_double or inputs.numel() == 0:
        raise DataError(
            "floating-point inputs [N, D], single or double, not empty",
            f"{inputs.dtype} of shape {tuple(inputs.shape)}",
            "give one row of numbers per example",
        )
    if targets.dim() == 0 or len(targets) != len(inputs):
        raise DataError(
            f"{len(inputs)} targets, one per row of the inputs",
            f"targets of shape {tuple(targets.shape)}",
            "check the lengths",
        )
    for name, values in (("inputs", inputs), ("targets", targets)):
        if values.is_floating_point() and not torch.isfinite(values).all():
            raise NonFiniteError(f"finite {name}", "NaN or infinity", "clean the data")
    return inputs, targets
