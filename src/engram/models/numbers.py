"""Arrays that a caller gives, as tensors of real numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.core.errors import DataError


def as_numbers(name: str, values: Any) -> Tensor:
    """A tensor of real numbers; DataError for all else."""
    try:
        found = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} as numbers", type(values).__name__, "pass a tensor") from error
    if found.is_complex():
        raise DataError(f"a {name} of real numbers", str(found.dtype), "pass a floating-point one")
    return found.detach()
