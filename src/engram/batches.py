"""From a Dataset, tensors, a DataLoader or dicts to batches with stable indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from engram.errors import DataError

Data = Any
Inputs = Any
LABEL_KEYS = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class Batch:
    """Some examples: which ones, what goes into the model, what should come out."""

    indices: Tensor
    inputs: tuple[Any, ...] | dict[str, Any]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def select(self, positions: Tensor | slice) -> Batch:
        """The examples at these positions of the batch."""
        return Batch(
            self.indices[positions],
            _map(self.inputs, lambda t: t[positions]),
            self.targets[positions],
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; indices stay on the CPU."""
        return Batch(
            self.indices, _map(self.inputs, lambda t: t.to(device)), self.targets.to(device)
        )

    def in_single(self) -> Batch:
        """The same batch with its inputs in single precision."""
        return Batch(
            self.indices,
            _map(self.inputs, lambda t: t.float() if t.is_floating_point() else t),
            self.targets,
        )


def _map(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(inputs, dict):
        return {k: function(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return tuple(function(v) if isinstance(v, Tensor) else v for v in inputs)


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """Model outputs as [N, K], from a tensor or from an object or dict with ``logits``."""
    return as_outputs(model(**inputs) if isinstance(inputs, dict) else model(*inputs))


def logits_of(output: Any) -> Any:
    """The outputs inside of what a model returned: its ``logits`` where it has some."""
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
    if logits.dim() == 1:
        logits = logits[:, None]
    if logits.dim() != 2:
        raise DataError(
            "model outputs of shape [N, K], one row per example",
            f"shape {tuple(logits.shape)}",
            "reduce or reshape the outputs inside the model",
        )
    return logits


class Batches:
    """The examples of a data set, always in the same order, as often as wanted.

    Args:
        data: a map-style ``Dataset`` of (x, y) or dicts, a tuple of tensors whose last is the
            target, or a ``DataLoader`` that neither shuffles nor drops.
        batch_size: examples per batch; a DataLoader keeps its own.

    Example:
        >>> batches = Batches((torch.zeros(5, 3), torch.arange(5)), batch_size=2)
        >>> [batch.indices.tolist() for batch in batches]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, data: Data, batch_size: int) -> None:
        self.batch_size = batch_size
        self.data: Any = data
        if isinstance(data, DataLoader):
            _check_loader(data)
            self.num_data = len(data.dataset)  # type: ignore[arg-type]
        elif _is_tensors(data):
            self.num_data = _common_length(data)
        elif isinstance(data, Mapping):
            self.num_data = _common_length(tuple(data.values()))
        elif _is_dataset(data):
            self.num_data = len(data)
        else:
            raise DataError(
                "a Dataset of (x, y), a tuple of tensors (x, y), or a DataLoader",
                type(data).__name__,
                "pass for instance (x, y) with both as tensors",
            )
        if self.num_data == 0:
            raise DataError("at least one example", "empty data", "check the selection")

    def __len__(self) -> int:
        if isinstance(self.data, DataLoader):
            return len(self.data)
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.data, DataLoader):
            start = 0
            for item in self.data:
                batch = _to_batch(item, start)
                yield batch
                start += len(batch)
            return
        for start in range(0, self.num_data, self.batch_size):
            indices = torch.arange(start, min(start + self.batch_size, self.num_data))
            if _is_tensors(self.data):  # in order: views instead of copies
                part = tuple(t[start : start + self.batch_size] for t in self.data)
                yield _to_batch(part, 0, indices)
            else:
                yield self.take(indices)

    def take(self, indices: Tensor) -> Batch:
        """The examples with these indices, in this order."""
        data: Any = self.data.dataset if isinstance(self.data, DataLoader) else self.data
        if _is_tensors(data):
            item: Any = tuple(t[indices.to(t.device)] for t in data)
        elif isinstance(data, Mapping):
            item = {k: v[indices.to(v.device)] for k, v in data.items()}
        else:
            collate = getattr(self.data, "collate_fn", None) or default_collate
            item = collate([data[int(i)] for i in indices])
        return _to_batch(item, 0, indices)

    def targets(self, indices: Tensor) -> Tensor:
        """The targets of the examples with these indices; inputs are read only where they must."""
        if _is_tensors(self.data):
            target: Tensor = self.data[-1]
            return target[indices.to(target.device)]
        return self.take(indices).targets

    def subset(self, indices: Tensor, batch_size: int | None = None) -> Iterator[Batch]:
        """Batches of the examples with these indices."""
        for chunk in indices.split(batch_size or self.batch_size):
            yield self.take(chunk)


def _is_dataset(data: Data) -> bool:
    """Indexable, and not a tuple of arrays that would be read as a list of examples."""
    indexable = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    arrays = isinstance(data, tuple) and any(hasattr(part, "shape") for part in data)
    return indexable and not arrays and not hasattr(data, "shape")


def _is_tensors(data: Data) -> bool:
    return (
        isinstance(data, Sequence) and len(data) >= 2 and all(isinstance(t, Tensor) for t in data)
    )


def _common_length(tensors: Sequence[Tensor]) -> int:
    lengths = {len(t) for t in tensors}
    if len(lengths) != 1:
        raise DataError(
            "inputs and targets with one row per example each",
            f"lengths {sorted(lengths)}",
            "give tensors of the same first dimension",
        )
    return lengths.pop()


def _check_loader(loader: DataLoader[Any]) -> None:
    dataset: Dataset[Any] = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            "a loader over a map-style dataset",
            "an iterable dataset, whose examples have no index",
            "use a Dataset with __len__ and __getitem__",
        )
    grouped = loader.batch_sampler
    sampler = loader.sampler if grouped is None else getattr(grouped, "sampler", grouped)
    in_order = isinstance(sampler, SequentialSampler)
    if not in_order or (grouped is not None and type(grouped) is not BatchSampler):
        raise DataError(
            "a DataLoader that reads the data in order",
            f"one with {type(sampler).__name__} (it shuffles or subsamples)",
            "pass the dataset itself, or a DataLoader with shuffle=False and no sampler",
        )
    batch_size = getattr(grouped, "batch_size", None) or loader.batch_size or 1
    if getattr(grouped, "drop_last", loader.drop_last) and len(dataset) % batch_size:
        raise DataError(
            "a DataLoader that gives every example",
            "drop_last=True, which drops the last incomplete batch",
            "pass drop_last=False",
        )


def _to_batch(item: Any, start: int, indices: Tensor | None = None) -> Batch:
    inputs: tuple[Any, ...] | dict[str, Any]
    if isinstance(item, Mapping):
        key = next((k for k in LABEL_KEYS if k in item), None)
        if key is None:
            raise DataError(
                f"a dict batch with one of the keys {LABEL_KEYS}", f"{sorted(item)}", "add labels"
            )
        targets = item[key]
        inputs = {k: v for k, v in item.items() if k != key}
    elif isinstance(item, Sequence) and len(item) >= 2:
        *first, targets = item
        inputs = tuple(first)
        if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
            inputs = tuple(inputs[0])
        elif len(inputs) == 1 and isinstance(inputs[0], Mapping):
            inputs = dict(inputs[0])
    else:
        raise DataError(
            "examples (x, y), or dicts with labels", type(item).__name__, "return inputs and target"
        )
    if not isinstance(targets, Tensor):
        raise DataError("targets as a tensor", type(targets).__name__, "convert them to a tensor")
    if indices is None:
        indices = torch.arange(start, start + len(targets))
    return Batch(indices, inputs, targets)
