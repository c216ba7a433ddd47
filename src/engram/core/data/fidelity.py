"""Whether the rows of a batch are the examples that they stand for, on a sample of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.core.data.inputs import tensors_of
from engram.core.errors import DataError
from engram.core.selection import spread

if TYPE_CHECKING:
    from engram.core.data.batches import Batch

ROUNDINGS = 100.0  # between a row of a batch and the same example by itself
ROWS = 6  # of a batch, its first and last among them
BATCHES = 8  # of a pass, the first and last among them
Alone = Callable[[int], "Batch"]  #: an example, read and collated by itself


def check_rows_in_order(batch: Batch, alone: Alone) -> None:
    """DataError if some row is not its example: another order, or examples mixed with others.

    Where two readings of an example differ, only its target tells; where that differs too, the
    collate_fn draws random numbers.
    """
    for position in spread(len(batch), ROWS).tolist():
        index = int(batch.indices[position])
        own = alone(index)
        if same_example(batch, position, own):
            continue
        if not same_example(own, 0, alone(index)):
            if same_example(batch, position, own, whole=False):
                continue
            raise not_repeatable(f"example {index} was other when it was collated again")
        raise DataError(
            "batches whose rows are the examples of the data set, in its order",
            f"another row where example {index} belongs",
            "leave the sampler out, and give a collate_fn that neither reorders nor mixes examples",
        )


def check_repeatable(alone: Alone, num_data: int) -> None:
    """DataError if an example is not the same when it is read again."""
    for index in spread(num_data, ROWS).tolist():
        if not same_example(alone(index), 0, alone(index)):
            raise not_repeatable(f"example {index} was other when it was read again")


def not_repeatable(how: str) -> DataError:
    """The error for data that is drawn anew."""
    return DataError(
        "data that is deterministic: the same examples each time they are read",
        f"{how}, as with random augmentation",
        "pass the same examples without augmentation, with the transform of the evaluation",
    )


def same_example(batch: Batch, position: int, alone: Batch, whole: bool = True) -> bool:
    """Whether a row of a batch is this example; without ``whole`` only its target is compared."""
    rows = [batch.targets, *(tensors_of(batch.inputs) if whole else [])]
    single = [alone.targets, *(tensors_of(alone.inputs) if whole else [])]
    return len(rows) == len(single) and all(
        _same(row[position], own[0]) for row, own in zip(rows, single, strict=True)
    )


def _same(row: Tensor, own: Tensor) -> bool:
    """Equal, or equal but for what pads the longer one at its end or at its beginning."""
    if row.dim() != own.dim():
        return False
    if row.shape == own.shape:
        return _equal(row, own)
    common = [min(m, n) for m, n in zip(row.shape, own.shape, strict=True)]
    ends = [
        tuple(slice(size - n, None) for size, n in zip(t.shape, common, strict=True))
        for t in (row, own)
    ]
    starts = tuple(slice(n) for n in common)
    return _equal(row[starts], own[starts]) or _equal(row[ends[0]], own[ends[1]])


def _equal(row: Tensor, own: Tensor) -> bool:
    if not (row.is_floating_point() or row.is_complex()) or row.dtype != own.dtype:
        return torch.equal(row, own)
    tolerance = ROUNDINGS * torch.finfo(row.dtype).eps
    size = own.abs()
    finite = size[size.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(row, own, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
