"""Gradients that are scaled down between the backward pass and the step.

A step sees a share of the gradient where it was clipped by its norm. One small parameter tells: the
norm of its gradient when it was accumulated, against the one that the step sees: at every step
while gradients are clipped, at every fourth otherwise. Clipping by value, entry by entry, leaves no
such share and is seen only where it happens to this parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

SMALL = 4096  # entries of a parameter whose norm costs no time
NO_SCALE = 2.0**-10  # a share below this is the scale of a GradScaler that nobody has told us of
POWER_OF_TWO = 2.0**-3  # and so is one from here on down that is a power of two: its scales are
RARELY = 4  # steps between two looks as long as nothing is clipped; at once again where one is
EXACT = 1e-5  # relative rounding error of the ratio of two norms


class Watch:
    """The share of the gradient that a step sees.

    Args:
        parameters: of the optimizer.
        scaler: a ``torch.amp.GradScaler``, whose scale is in the gradients until the step.
    """

    def __init__(self, parameters: Sequence[Tensor], scaler: Any = None) -> None:
        self.scaler = scaler
        # of several processes, gradients are averaged after they are accumulated
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.sees_clipping = not distributed
        trained = [p for p in parameters if p.requires_grad and p.is_leaf]
        small = [p for p in trained if p.numel() <= SMALL]
        small = [p for p in small if p.dim() == 1] or small  # biases: no copy for their norm
        self._candidates = small or sorted(trained, key=Tensor.numel)[:1]
        self._watched: Tensor | None = None
        self._handle: RemovableHandle | None = None
        self._accumulated: Tensor | None = None
        self._wait = 0
        self._next()

    def _next(self) -> None:
        """Watch the next one: this one's gradient is 0."""
        self.remove()
        self._watched = self._candidates.pop(0) if self._candidates else None
        if self._watched is not None:
            self._handle = self._watched.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        if self._wait <= 0 and parameter.grad is not None:
            self._accumulated = _square(parameter.grad)

    def share(self) -> float:
        """Of the gradient that the last step saw; NaN where it was not finite."""
        accumulated, self._accumulated = self._accumulated, None
        if self._watched is None or self._watched.grad is None:
            return 1.0
        seen = math.sqrt(_square(self._watched.grad))
        if not math.isfinite(seen):
            return math.nan
        self._wait -= 1
        if accumulated is None or not self.sees_clipping:
            return 1.0
        before = math.sqrt(accumulated)
        if not before:
            self._next()
        if not before or not math.isfinite(before):
            return 1.0
        scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        share = self._judged(seen / before * scale)
        self._wait = RARELY - 1 if share == 1 else 0
        return share

    def _judged(self, share: float) -> float:
        """The share, unless it is the scale of a GradScaler."""
        power = abs(math.frexp(share)[0] - 0.5) < EXACT
        if self.scaler is None and (share < NO_SCALE or (power and share <= POWER_OF_TWO)):
            self.sees_clipping = False
            return 1.0
        return 1.0 if abs(share - 1) < EXACT else share

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


def _square(gradient: Tensor) -> Tensor:
    """The square of its norm; the cheapest call that there is for a small tensor."""
    flat = gradient if gradient.dim() == 1 else gradient.reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()  # squares of halves overflow
    return torch.dot(flat, flat)
