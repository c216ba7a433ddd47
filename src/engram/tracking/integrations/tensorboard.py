"""Losses and scores of a tracker as TensorBoard scalars and histograms."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from engram.core.errors import ArgumentError
from engram.tracking.history import Record

LOSSES = {"train": "train_nll", "estimate": "loo_nll", "validation": "validation_nll"}


class BoardWriter:
    """Writes every record that it is called with.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``; it is neither flushed nor closed.
        prefix: in front of the names.
    """

    def __init__(self, writer: Any, prefix: str) -> None:
        if not (hasattr(writer, "add_scalar") and hasattr(writer, "add_histogram")):
            raise ArgumentError(
                "a torch.utils.tensorboard.SummaryWriter",
                type(writer).__name__,
                "pip install 'engram[tensorboard]' and pass SummaryWriter(folder)",
            )
        self.writer, self.prefix = writer, prefix

    def __call__(self, record: Record, scores: Tensor) -> None:
        for name, shown in LOSSES.items():
            value = getattr(record, name)
            if math.isfinite(value):
                self.writer.add_scalar(f"{self.prefix}/{shown}", value, record.step)
        known = scores[scores.isfinite()]
        if len(known):
            self.writer.add_histogram(f"{self.prefix}/score", known, record.step)
