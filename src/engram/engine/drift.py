"""What a stretch of training does to displacements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: k A below which the gain is k: the difference is beyond single precision
NO_DECAY = 1e-4


@dataclass(frozen=True)
class Drift:
    """What a stretch of training does to displacements, in the eigenbasis of a block.

    Args:
        decay: exp(-k A), by which an old displacement is multiplied.
        gain: (1 - exp(-k A)) / (A N), by which the gradients of the stretch are.
    """

    decay: Tensor
    gain: Tensor

    @classmethod
    def over(cls, time: Tensor, curvature: Tensor, num_data: int) -> Drift:
        """Over a training time k with mean curvature A, one for every eigendirection.

        Example:
            >>> Drift.over(torch.tensor([2.0, 1e9]), torch.tensor([0.0, 4.0]), 10).gain
            tensor([0.2000, 0.0250])
        """
        rate = time * curvature
        slow = rate < NO_DECAY
        filtered = -torch.expm1(-rate) / torch.where(slow, torch.ones_like(curvature), curvature)
        return cls(torch.exp(-rate), torch.where(slow, time, filtered) / num_data)

    def to(self, dtype: torch.dtype) -> Drift:
        """In another type."""
        return Drift(self.decay.to(dtype), self.gain.to(dtype))


Drifts = Mapping[tuple[str, ...], Drift]  # by the names of a block
