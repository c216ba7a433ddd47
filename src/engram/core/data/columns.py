"""Columns of N rows, collected batch by batch in preallocated tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from engram.core.memory import check_room
from engram.errors import DataError, NonFiniteError

HALVES = (torch.bfloat16, torch.float16)  # too coarse for losses, and unknown to pandas


def finite(what: str, rows: Tensor) -> Tensor:
    """The rows; NonFiniteError that names the first one with NaN or infinity."""
    bad = ~rows.reshape(len(rows), -1).isfinite().all(1)
    if bad.any():
        raise NonFiniteError(
            f"finite {what}",
            f"NaN or infinity for example {int(bad.nonzero()[0])}",
            "scale the inputs of the model, or drop that example",
        )
    return rows


class Columns:
    """Named columns on the CPU, each allocated once: with many outputs they are the bulk.

    Args:
        num_rows: N.
        padding: columns [N, T] whose rows may differ in width, and what they are filled up with.

    Example:
        >>> columns = Columns(3)
        >>> columns.add({"loss": torch.tensor([1.0, 2.0])})
        >>> columns.add({"loss": torch.tensor([3.0])})
        >>> columns["loss"]
        tensor([1., 2., 3.])
    """

    def __init__(self, num_rows: int, padding: Mapping[str, float] | None = None) -> None:
        self.num_rows = num_rows
        self.padding = padding or {}
        self.filled = 0
        self.tensors: dict[str, Tensor] = {}

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Append the rows of one batch, the same names every time."""
        count = len(next(iter(rows.values())))
        if self.filled + count > self.num_rows:
            raise _wrong_rows(self.num_rows, self.filled + count)
        if not self.tensors:
            self._check_room(rows)
        for name, tensor in rows.items():
            value = tensor.float() if tensor.dtype in HALVES else tensor
            if name not in self.tensors:
                self.tensors[name] = torch.empty(self.num_rows, *value.shape[1:], dtype=value.dtype)
            if name in self.padding:
                value = self._of_one_width(name, value)
            self.tensors[name][self.filled : self.filled + count].copy_(value.detach())
        self.filled += count

    def _of_one_width(self, name: str, value: Tensor) -> Tensor:
        """The rows as wide as those before them; both are filled up to the wider of the two."""
        before, fill = self.tensors[name], self.padding[name]
        missing = value.shape[1] - before.shape[1]
        if missing > 0:
            self.tensors[name] = pad(before, (0, missing), value=fill)
        return pad(value, (0, max(0, -missing)), value=fill)

    def _check_room(self, rows: Mapping[str, Tensor]) -> None:
        """MemoryLimitError before anything is computed where the columns do not fit into memory."""
        size = self.num_rows * sum(t[0].numel() * t.element_size() for t in rows.values())
        largest = max(rows.values(), key=lambda t: t[0].numel())
        shape = " x ".join(f"{n:,}" for n in (self.num_rows, *largest.shape[1:]))
        remedy = "take fewer examples in one call, or a model with fewer outputs"
        check_room(size, torch.device("cpu"), f"the result, with tensors of {shape}", remedy)

    def complete(self) -> dict[str, Tensor]:
        """All columns, once every row has been added."""
        if self.filled != self.num_rows:
            raise _wrong_rows(self.num_rows, self.filled)
        return self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.complete()[name]


def _wrong_rows(expected: int, found: int) -> DataError:
    return DataError(
        f"{expected:,} rows, one per example",
        f"{found:,}",
        "check that the data gives every example once in every pass",
    )
