"""What is left of an example's information when it goes."""

from __future__ import annotations

import torch
from torch import Tensor


def remaining(leverage: Tensor, nothing: float) -> Tensor:
    """1 - h; NaN where nothing remains, for without it some combination of columns is free."""
    left = 1 - leverage
    return torch.where(left < nothing, torch.nan, left)
