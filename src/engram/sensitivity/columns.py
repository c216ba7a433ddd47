"""Batches put together into columns of N rows, written in place as they come."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)  # too coarse for losses, and unknown to pandas


class Columns:
    """Named columns on the CPU, each allocated once: with many outputs they are the bulk.

    Example:
        >>> columns = Columns(3)
        >>> columns.add({"loss": torch.tensor([1.0, 2.0])})
        >>> columns.add({"loss": torch.tensor([3.0])})
        >>> columns["loss"]
        tensor([1., 2., 3.])
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.filled = 0
        self.tensors: dict[str, Tensor] = {}

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Append the rows of one batch, the same names every time."""
        count = len(next(iter(rows.values())))
        for name, tensor in rows.items():
            value = tensor.float() if tensor.dtype in HALVES else tensor
            if name not in self.tensors:
                self.tensors[name] = torch.empty(self.num_rows, *value.shape[1:], dtype=value.dtype)
            self.tensors[name][self.filled : self.filled + count].copy_(value.detach())
        self.filled += count

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]
