"""From a Dataset, tensors, a DataLoader or dicts to batches with stable indices."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from engram.core.data.checks import (
    BATCHES,
    check_loader,
    check_repeatable,
    check_rows_in_order,
    not_repeatable,
    own_pass,
)
from engram.core.data.inputs import Data as Data
from engram.core.data.inputs import Inputs as Inputs
from engram.core.data.inputs import (
    check_rows,
    common_length,
    handed,
    is_dataset,
    is_table,
    length_of,
    mapped,
    parts,
    plain,
    tensors_of,
)
from engram.core.selection import spread
from engram.errors import DataError, EngineError, brief


@dataclass(frozen=True)
class Batch:
    """A batch of examples: their indices, inputs and targets."""

    indices: Tensor
    inputs: tuple[Any, ...] | dict[str, Any]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def select(self, positions: Tensor | slice) -> Batch:
        """The examples at these positions of the batch."""
        return Batch(
            self.indices[positions],
            mapped(self.inputs, lambda t: t[positions]),
            self.targets[positions],
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; indices stay on the CPU."""
        inputs = mapped(self.inputs, lambda t: t.to(device))
        return Batch(self.indices, inputs, self.targets.to(device))


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """Model outputs as [N, K], from a tensor or from an object or dict with ``logits``.

    Those of sequences, [N, T, V], come as [N, T * V].
    """
    return flat_outputs(raw_outputs(model, inputs))


def raw_outputs(model: nn.Module, inputs: Inputs) -> Any:
    """What the model returns."""
    args, kwargs = handed(inputs)
    return model(*args, **kwargs)


def flat_outputs(output: Any) -> Tensor:
    """What a model returned, as [N, K]; that of sequences, [N, T, V], as [N, T * V]."""
    logits = logits_of(output)
    by_token = isinstance(logits, Tensor) and logits.dim() == 3
    return as_outputs(logits.flatten(1) if by_token else logits)


def output_shape(output: Any) -> torch.Size:
    """Of what a model returned, without the examples: (K), or (T, V) of sequences."""
    logits: Tensor = logits_of(output)
    return logits.shape[1:] if logits.dim() > 1 else torch.Size((1,))


def logits_of(output: Any) -> Any:
    """What a model returned, or its ``logits`` where it is an object or dict that has some."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def as_outputs(output: Any) -> Tensor:
    """What a model returned, as [N, K]."""
    logits = logits_of(output)
    if not isinstance(logits, Tensor):
        raise DataError(
            "a model that returns a tensor, or an object or dict with logits",
            type(logits).__name__,
            "wrap the model in a module whose forward returns the outputs [N, K]",
        )
    if not logits.is_floating_point():
        raise EngineError(
            "real outputs that depend on the trainable parameters",
            f"outputs of {logits.dtype}",
            "return the outputs themselves, no argmax(); of complex numbers, their two parts",
        )
    if logits.dim() == 1:
        logits = logits[:, None]
    if logits.dim() != 2:
        raise DataError(
            "model outputs of shape [N, K], one row per example",
            f"shape {tuple(logits.shape)}",
            "reduce or reshape the outputs inside the model",
        )
    return logits


def check_output_rows(outputs: Tensor, count: int) -> None:
    """DataError unless there is a row of outputs for each of so many examples."""
    if len(outputs) != count:
        raise DataError(
            "one row of outputs per example",
            f"{len(outputs):,} rows for {count:,} examples",
            "return outputs [N, K]; of graphs or sequences, pool or pad inside the model",
        )


class Batches:
    """The examples of a data set, always in the same order, as often as wanted.

    Every pass gives every example once, or is an error that says how many came. What a loader
    or a collate_fn gives is compared with single examples of the data set, on a sample; and every
    pass with the first one.

    Args:
        data: a map-style ``Dataset`` of (x, y) or dicts, tensors (x, y), ((a, b), y), ({...}, y)
            or a dict with labels, or a ``DataLoader`` that neither shuffles nor drops.
        batch_size: examples per batch; a DataLoader keeps its own.
        labelled: whether there must be targets. Without them inputs may come alone, as a tensor, a
            tuple (x,) or a dict, and the targets are zeros.

    Example:
        >>> batches = Batches((torch.zeros(5, 3), torch.arange(5)), batch_size=2)
        >>> [batch.indices.tolist() for batch in batches]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, data: Data, batch_size: int, labelled: bool = True) -> None:
        self.batch_size, self.labelled = batch_size, labelled
        self.data: Any = plain(data) if isinstance(data, Mapping) else data
        if not labelled and isinstance(data, Tensor):
            self.data = (data,)
        self.table = is_table(self.data, labelled)
        self._sums: dict[int, list[complex]] = {}  # of the first pass, by a batch's first example
        if isinstance(data, DataLoader):
            check_loader(data)
            self.num_data = length_of(data.dataset)
        elif self.table:
            self.num_data = common_length(tensors_of(self.data))
            self._columns = _columns(self.data, labelled)
        elif is_dataset(data):
            self.num_data = length_of(data)
        else:
            kinds = [type(part).__name__ for part in data] if isinstance(data, tuple | list) else []
            raise DataError(
                "a Dataset of (x, y), a tuple of tensors (x, y), or a DataLoader",
                type(data).__name__ + (f" of {', '.join(kinds[:4])}" if kinds else ""),
                "write the stream down once: engram.spool(source, folder)"
                if isinstance(data, Iterator | IterableDataset)
                else "pass for instance (x, y) with both as tensors",
            )
        if self.num_data == 0:
            raise DataError("at least one example", "empty data", "check the selection")

    def __len__(self) -> int:
        if isinstance(self.data, DataLoader):
            return len(self.data)
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if self.table:  # in order: views instead of copies
            for start in range(0, self.num_data, self.batch_size):
                stop = min(start + self.batch_size, self.num_data)
                yield self._rows(slice(start, stop), torch.arange(start, stop))
            return
        loaded = isinstance(self.data, DataLoader)
        for batch in self._loaded() if loaded else self.subset(torch.arange(self.num_data)):
            self._check_unchanged(batch)
            yield batch

    def _loaded(self) -> Iterator[Batch]:
        """The batches of a loader, counted and compared with the data set."""
        with torch.random.fork_rng(devices=[]):  # every iterator draws a seed for its workers
            source = own_pass(self.data)
        compared = {n * self._loader_batch() for n in spread(len(self.data), BATCHES).tolist()}
        start, ended = 0, object()
        while (item := self._next(source, ended, start)) is not ended:
            batch = self._batch(item, None, start)
            self._check_count(start, len(batch))
            if start in compared or start + len(batch) == self.num_data:
                check_rows_in_order(batch, self.alone)
            yield batch
            start += len(batch)
        if start != self.num_data:
            raise _wrong_count(self.num_data, start)

    def _loader_batch(self) -> int:
        size: int = self.data.batch_sampler.batch_size
        return size

    def _next(self, source: Iterator[Any], ended: object, start: int) -> Any:
        try:
            return next(source, ended)
        except (IndexError, KeyError, RuntimeError):
            stop = min(start + self._loader_batch(), self.num_data)
            self.take(torch.arange(start, stop))  # says what is wrong where it is the data
            raise

    def _check_count(self, start: int, found: int) -> None:
        """Batches of the standard sampler have a known size; of others the sum has to do."""
        if start + found > self.num_data:
            raise _wrong_count(self.num_data, start + found)
        expected = min(self._loader_batch(), self.num_data - start)
        if type(self.data.batch_sampler) is BatchSampler and found != expected:
            raise _wrong_rows(start, expected, found)

    def _check_unchanged(self, batch: Batch) -> None:
        """Sums over a batch are those of the first pass."""
        tensors = [batch.targets, *tensors_of(batch.inputs)]
        sums = [complex(t.detach().sum()) for t in tensors]
        first = self._sums.setdefault(int(batch.indices[0]), sums)
        if any(a != b and not (a != a and b != b) for a, b in zip(first, sums, strict=True)):
            low, high = int(batch.indices[0]), int(batch.indices[-1])
            raise not_repeatable(f"examples {low} to {high} changed since the first pass")

    def take(self, indices: Tensor) -> Batch:
        """The examples with these indices, in this order."""
        if self.table:
            return self._rows(indices, indices)
        items = [self._item(int(i)) for i in indices]
        batch = self._collated(items, indices)
        if self._own_collate() is not None and len(items) > 1:
            places = {int(i): place for place, i in enumerate(indices)}
            check_rows_in_order(
                batch, lambda i: self._collated([items[places[i]]], torch.tensor([i]))
            )
        return batch

    def alone(self, index: int) -> Batch:
        """One example, read anew."""
        return self._collated([self._item(index)], torch.tensor([index]))

    def check_repeatable(self) -> None:
        """DataError if examples differ from one reading to the next."""
        if not self.table:
            check_repeatable(self.alone, self.num_data)

    def _item(self, index: int) -> Any:
        data = self.data.dataset if isinstance(self.data, DataLoader) else self.data
        try:
            item = data[index]
        except (IndexError, KeyError) as error:
            raise DataError(
                f"{self.num_data:,} examples, as the data set's length says",
                f"{brief(error)} for example {index}",
                "have __len__ return the number of examples",
            ) from error
        if item is None:
            raise DataError(
                "examples (x, y), or dicts with labels",
                f"None for example {index}",
                "drop broken examples from the data set itself",
            )
        return item

    def _own_collate(self) -> Any:
        """The collate_fn of the user, if there is one."""
        own = getattr(self.data, "collate_fn", None)
        return None if own is default_collate else own

    def _collated(self, items: list[Any], indices: Tensor) -> Batch:
        own = self._own_collate()
        if own is not None:  # it may take out of an item what it has read
            return self._batch(own([copy.copy(item) for item in items]), indices)
        try:
            item = default_collate(items)
        except (RuntimeError, TypeError) as error:
            raise DataError(
                "examples of one shape and kind, which can be stacked to a batch",
                brief(error),
                "pad them to one length, or pass a DataLoader with a collate_fn that does",
            ) from error
        return self._batch(item, indices)

    def _rows(self, positions: Tensor | slice, indices: Tensor) -> Batch:
        """A batch of rows of tensors in memory."""
        inputs, targets = self._columns
        return Batch(indices, mapped(inputs, lambda t: t[positions]), targets[positions])

    def _batch(self, item: Any, indices: Tensor | None, start: int = 0) -> Batch:
        """A batch of examples that were read; without indices they are numbered from ``start``."""
        inputs, targets = _columns(item, self.labelled)
        if indices is None:
            indices = torch.arange(start, start + len(targets))
        if len(targets) != len(indices):
            raise _wrong_rows(int(indices[0]), len(indices), len(targets))
        return Batch(indices, inputs, targets)

    def targets(self, indices: Tensor) -> Tensor:
        """The targets of the examples with these indices; inputs are read only where they must."""
        if self.table:
            return self._columns[1][indices]
        return self.take(indices).targets

    def subset(self, indices: Tensor, batch_size: int | None = None) -> Iterator[Batch]:
        """Batches of the examples with these indices."""
        for chunk in indices.split(batch_size or self.batch_size) if len(indices) else ():
            yield self.take(chunk)


def _wrong_count(expected: int, found: int) -> DataError:
    more = "at least " if found > expected else ""
    return DataError(
        f"{expected:,} examples in a pass, as many as the data set has",
        f"{more}{found:,}",
        "check the sampler, the collate_fn and the data set's __len__",
    )


def _wrong_rows(start: int, expected: int, found: int) -> DataError:
    return DataError(
        f"{expected:,} rows for the examples {start} to {start + expected - 1}",
        f"{found:,}",
        "give a collate_fn that keeps every example; drop broken ones from the data set itself",
    )


def _columns(item: Any, labelled: bool) -> tuple[Any, Tensor]:
    """Inputs and targets with as many rows each; what autograd cannot use comes as a copy."""
    usable = mapped(plain(item), lambda t: t.clone() if t.is_inference() else t)
    inputs, targets = parts(usable, labelled)
    if targets is None:
        targets = torch.zeros(len(next(iter(tensors_of(inputs)), ())))
    if not isinstance(targets, Tensor) or targets.dim() == 0:
        what = type(targets).__name__ if not isinstance(targets, Tensor) else "a single number"
        raise DataError("targets as a tensor, a row per example", what, "convert them to a tensor")
    check_rows(inputs, len(targets))
    check_rows({"targets": targets}, len(targets))
    return inputs, targets
