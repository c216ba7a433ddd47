"""Whether a DataLoader gives the examples of its data set: each one, once, in order."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from engram.core.data.forms import length_of
from engram.core.errors import DataError


def check_loader(loader: DataLoader[Any]) -> None:
    """DataError unless its samplers go through a map-style data set in order."""
    dataset: Dataset[Any] = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            "a loader over a map-style dataset",
            "an iterable dataset, whose examples have no index",
            "use a Dataset with __len__ and __getitem__",
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
    """A pass that is not the caller's.

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
    """What a sampler of the user's own gives; no example is read for it."""
    found = list(islice(indices, num_data + 1))
    if len(found) != num_data:
        more = "more than " if len(found) > num_data else ""
        count = min(len(found), num_data)
        raise _not_in_order(sampler, f"it gives {more}{count:,} of {num_data:,} examples")
    wrong = next((i for i, index in enumerate(found) if int(index) != i), None)
    if wrong is not None:
        raise _not_in_order(sampler, f"it gives example {found[wrong]} at position {wrong}")


def _not_in_order(sampler: Any, how: str) -> DataError:
    return DataError(
        "a DataLoader that reads the data in order",
        f"one with {type(sampler).__name__} ({how})",
        "pass the dataset itself, or a DataLoader with shuffle=False and no sampler",
    )
