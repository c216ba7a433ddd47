"""Checks that batches hold every example of the data set once, in order, and the same every time.

A loader's samplers tell most of it without reading anything. The rest is compared on a sample of
batches and rows, because reading everything twice would double the cost of every pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from engram.core.data.inputs import length_of, tensors_of
from engram.core.selection import spread
from engram.errors import DataError

if TYPE_CHECKING:
    from engram.core.data.batches import Batch

# More rows and batches notice rarer mistakes, and read more of the data twice
ROWS = 6  # of a batch that are compared, its first and last among them
BATCHES = 8  # of a pass that are compared, the first and last among them
ROUNDINGS = 100.0  # machine epsilons by which a row may differ from the same example by itself
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
            "leave the sampler out, and give a collate_fn that neither reorders nor mixes "
            "examples: of a training with mixup or cutmix, pass the plain examples",
        )


def check_repeatable(alone: Alone, num_data: int) -> None:
    """DataError if an example is not the same when it is read again."""
    for index in spread(num_data, ROWS).tolist():
        if not same_example(alone(index), 0, alone(index)):
            raise not_repeatable(f"example {index} was other when it was read again")


def not_repeatable(how: str) -> DataError:
    """The error for data that differs from one reading to the next."""
    return DataError(
        "data that is deterministic: the same examples each time they are read",
        f"{how}, as with random augmentation, mixup or cutmix",
        "pass the same examples without augmentation, with the transform of the evaluation, or one "
        "fixed view of each: what is estimated is the effect of an example as it is passed; "
        "mixtures that are fixed may have soft labels",
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


def check_loader(loader: DataLoader[Any]) -> None:
    """DataError unless its samplers go through a map-style data set in order."""
    dataset: Dataset[Any] = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            "a loader over a map-style dataset",
            "an iterable dataset, whose examples have no index",
            "use a Dataset with __len__ and __getitem__, or write it down once: engram.spool",
        )
    grouped = loader.batch_sampler
    if grouped is None:
        raise DataError(
            "a DataLoader that makes batches",
            "batch_size=None, which gives single items",
            "pass the dataset itself, or a DataLoader with a batch_size",
        )
    sampler = getattr(grouped, "sampler", grouped)
    if not isinstance(sampler, SequentialSampler) or not isinstance(grouped, BatchSampler):
        raise _not_in_order(sampler, "it shuffles or subsamples")
    if grouped.drop_last and length_of(dataset) % grouped.batch_size:
        raise DataError(
            "a DataLoader that gives every example",
            "drop_last=True, which drops the last incomplete batch",
            "pass drop_last=False",
        )
    if type(sampler) is not SequentialSampler:
        _check_order(sampler, length_of(dataset), sampler)
    if type(grouped) is not BatchSampler:
        _check_order(chain.from_iterable(grouped), length_of(dataset), grouped)


def own_pass(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator over a loader that leaves the caller's own iteration and generator alone.

    Persistent workers serve one pass at a time: another begins theirs anew, also where they are in
    the midst of it. And every pass draws a seed from the loader's generator.
    """
    if loader.generator is None and not loader.persistent_workers:
        return iter(loader)
    own = copy.copy(loader)
    own._iterator = None
    if loader.generator is not None:
        own.generator = torch.Generator(loader.generator.device)
        own.generator.set_state(loader.generator.get_state())
    return iter(own)


def _check_order(indices: Iterable[int], num_data: int, sampler: Any) -> None:
    """Check the indices of a custom sampler; no example is read for it."""
    found = list(islice(indices, num_data + 1))
    if len(found) != num_data:
        more = "more than " if len(found) > num_data else ""
        count = min(len(found), num_data)
        raise _not_in_order(sampler, f"it gives {more}{count:,} of {num_data:,} examples")
    wrong = next((i for i, index in enumerate(found) if int(index) != i), None)
    if wrong is not None:
        raise _not_in_order(sampler, f"it gives example {found[wrong]} at position {wrong}")


def _not_in_order(sampler: Any, how: str) -> DataError:
    if isinstance(sampler, DistributedSampler):
        return DataError(
            "all of the data on every process",
            f"a DataLoader with a {type(sampler).__name__}, which gives a part of it",
            "pass the dataset itself; across_ranks=True divides it without repeats",
        )
    return DataError(
        "a DataLoader that reads the data in order",
        f"one with {type(sampler).__name__} ({how})",
        "pass the dataset itself, or a DataLoader with shuffle=False and no sampler",
    )
