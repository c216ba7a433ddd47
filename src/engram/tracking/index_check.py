"""Which examples a training step sees: a dataset that gives their indices, and a check of them.

The check: does the batch of a step hold the examples that its indices name, in their order? Rows
are compared by an exact hash of their bits. Where the training changes its inputs on the way
(augmentation, normalisation) no row is found anywhere, and nothing can be said; where rows are
other examples of the data, indices and batch do not belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from engram.core.data.batches import Batches, Data
from engram.core.data.inputs import mapped
from engram.core.selection import check_indices
from engram.core.state.process import random_states, restored
from engram.engine.interception import tensors
from engram.engine.streaming.step import StepRecorder
from engram.errors import ArgumentError, DataError

Indices = Tensor | Sequence[int] | None

# What a check may cost beside the step itself.
CHECKED_EVERY = 50  # steps between two checks that read the examples from a dataset once more
LARGEST_WIDTH = 512  # entries of a row that are hashed, spread over it
TABLE_ROWS = 4096  # rows that are hashed at a time where all are: speed against memory
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an entry


class Indexed(Dataset[Any]):
    """The examples of a data set with their index in front, (index, x, y).

    A dict gets the key ``index`` instead. Shuffle and batch it as you like.

    Example:
        >>> import torch
        >>> data = Indexed((torch.zeros(3, 2), torch.tensor([5, 6, 7])))
        >>> data[1]
        (1, tensor([0., 0.]), tensor(6))
    """

    def __init__(self, data: Data) -> None:
        if hasattr(data, "dataset"):
            raise DataError(
                "a dataset or a tuple of tensors",
                type(data).__name__,
                "wrap the loader's dataset, and make a new loader of it",
            )
        self.batches = Batches(data, 1)

    def __len__(self) -> int:
        return self.batches.num_data

    def __getitem__(self, index: int) -> Any:
        data = self.batches.data
        item = mapped(data, lambda t: t[index]) if self.batches.table else data[index]
        return {"index": index} | dict(item) if isinstance(item, Mapping) else (index, *item)


def check_batch_indices(indices: Indices, num_data: int) -> Tensor:
    """The examples of a step, each once; a batch that does not say which they are is an error."""
    if indices is None:
        raise ArgumentError(
            "the indices of the examples in the batch",
            "a batch without indices",
            "let the loader give them, for instance DataLoader(tracker.indexed(dataset), ...)",
        )
    once = "draw batches without replacement; a later step may visit an example again"
    return check_indices(indices, num_data, once)


class IndexCheck:
    """Compares the batches of training steps with the examples that their indices name.

    Args:
        batches: of the data that indices refer to.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self._hashed: Known | None = None  # of every row, where the data is in memory

    def targets(
        self, seen: StepRecorder, chosen: Tensor, given: Tensor | None, step: int
    ) -> Tensor:
        """The targets of a step, after its inputs are compared with the examples'.

        Args:
            seen: the model's call.
            chosen: the indices.
            given: targets of the user's, or None for the data's.
            step: its number; a dataset is read again at some steps only.
        """
        if given is not None:
            _check_targets(given, len(chosen))
        if given is not None and not self.batches.table and step % CHECKED_EVERY:
            return given
        # reading an example may draw random numbers, which the training must not miss
        with nullcontext() if self.batches.table else restored(tuple(random_states())):
            own = self.batches.take(chosen)
        names = sorted(own.inputs) if isinstance(own.inputs, Mapping) else None
        self._check(chosen, seen, _rows(own.inputs, names, len(chosen)), names)
        return own.targets if given is None else given

    def _check(
        self, chosen: Tensor, call: StepRecorder, own: Sequence[Tensor], names: Sequence[str] | None
    ) -> None:
        if names is not None and (call.args or not set(names) <= set(call.kwargs)):
            return
        seen = _rows(call.args if names is None else call.kwargs, names, len(chosen))
        if not seen or [part.shape[1] for part in seen] != [part.shape[1] for part in own]:
            return
        found = _hashes(seen, seen)
        others = (found != _hashes(own, seen)).nonzero()[:, 0]
        if not len(others):
            return
        known = self._all(seen, names) if self.batches.table else Known(_hashes(own, seen), chosen)
        places = known.places(found[others])
        if (places < 0).any():
            return
        first = int(others[0])
        raise DataError(
            "indices and a batch that belong together: row by row the examples that the indices "
            f"name, such as example {int(chosen[first])} in row {first}",
            f"example {int(places[0])} there, and {len(others)} of {len(chosen)} rows in all that "
            "are other examples of the data",
            "give the positions in the order of the batch; let the loader give them, for instance "
            "DataLoader(tracker.indexed(dataset), ...)",
        )

    def _all(self, like: Sequence[Tensor], names: Sequence[str] | None) -> Known:
        if self._hashed is None:
            every = torch.arange(self.batches.num_data).split(TABLE_ROWS)
            parts = [_rows(self.batches.take(rows).inputs, names, len(rows)) for rows in every]
            found = torch.cat([_hashes(part, like) for part in parts])
            self._hashed = Known(found, torch.arange(self.batches.num_data))
        return self._hashed


class Known:
    """A lookup table from the hash of an example's inputs to its index.

    Args:
        hashes: one an example.
        numbers: of the examples.
    """

    def __init__(self, hashes: Tensor, numbers: Tensor) -> None:
        self.ordered, order = hashes.sort()
        self.numbers = numbers[order]

    def places(self, wanted: Tensor) -> Tensor:
        """Which examples have these hashes; -1 for none."""
        place = torch.searchsorted(self.ordered, wanted).clamp(max=len(self.ordered) - 1)
        return torch.where(self.ordered[place] == wanted, self.numbers[place], -1)


def _check_targets(given: Any, count: int) -> None:
    if not isinstance(given, Tensor) or not given.dim() or len(given) != count:
        raise DataError(
            f"targets of the batch as a tensor of {count} rows, one for each index",
            f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__,
            "pass the targets of exactly the examples in the batch, or leave them out",
        )


def check_length(batches: Batches) -> None:
    """DataError where the data has grown or shrunk since."""
    data: Any = getattr(batches.data, "dataset", batches.data)
    found = min(len(t) for t in tensors(data)) if batches.table else len(data)
    if found != batches.num_data:
        raise DataError(
            f"the {batches.num_data:,} examples that the tracker was made with",
            f"data of {found:,} now",
            "make a new tracker for other data",
        )


def _rows(inputs: Any, names: Sequence[str] | None, count: int) -> list[Tensor]:
    """The tensors with one row an example, each [B, D], at most so many entries of a row."""
    chosen = inputs if names is None else [inputs[name] for name in names]
    found = [t.detach() for t in tensors(chosen) if t.dim() and len(t) == count]
    flat = [t.reshape(len(t), -1) for t in found]
    return [t[:, :: -(-t.shape[1] // LARGEST_WIDTH) or 1] for t in flat if t.shape[1]]


def _hashes(parts: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """One number a row, [B]: sums of bits times fixed random factors, modulo 2^64."""
    total = torch.zeros(len(parts[0]), dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for part, other in zip(parts, like, strict=True):
        if part.is_floating_point() and other.is_floating_point():
            part = part.to(other.dtype)
        bits = part.contiguous().view(BITS[part.element_size()]).cpu().to(torch.int64)
        low, high = -(2**62), 2**62
        factors = torch.randint(low, high, (bits.shape[1],), generator=generator) * 2 + 1
        total += (bits * factors).sum(1)
    return total
