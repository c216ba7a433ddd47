"""What goes into a model: tensors with one row per example, alone or nested in tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SequenceKey, tree_flatten_with_path, tree_leaves, tree_map_only

from engram.core.errors import DataError

Inputs = Any
PLAIN = (bool, int, float, str, type(None))  # the same for every example


def mapped(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with a function applied to every tensor."""
    return tree_map_only(Tensor, function, inputs)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Every tensor, in a fixed order."""
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def plain(value: Any) -> Any:
    """The same with mappings of any kind as dicts: only these are looked into."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(part) for part in value)
    return value


def handed(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a forward pass, as copies.

    A model may write into what it is given (``x.add_(1)``, an in-place ReLU). The caller's data,
    and what the next pass over the same batch reads, must not see it.
    """
    copies = mapped(inputs, lambda t: t.clone())
    return ((), copies) if isinstance(copies, dict) else (tuple(copies), {})


def check_rows(inputs: Inputs, count: int) -> None:
    """DataError unless every tensor has one row for each of so many examples."""
    if any(isinstance(v, PackedSequence) for v in _values(inputs)):
        raise DataError(
            "inputs with one row per example",
            "a PackedSequence, whose rows are the steps of all sequences",
            "give padded sequences and their lengths, and pack them inside the model",
        )
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        name = "".join(map(str, path))
        if isinstance(leaf, Tensor):
            _check_tensor(leaf, name, count)
        elif len(path) > 1 and isinstance(path[-1], SequenceKey) and leaf is not None:
            raise DataError(
                "inputs as tensors",
                f"a list of {type(leaf).__name__} at {name}",
                "turn it into a tensor in the dataset or in a collate_fn",
            )
        elif not isinstance(leaf, PLAIN):
            raise DataError(
                "inputs as tensors, nested in tuples and dicts at most",
                f"{type(leaf).__name__} at {name}",
                "give its tensors, and make the object inside the model",
            )


def _values(inputs: Inputs) -> Sequence[Any]:
    return list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)


def _check_tensor(tensor: Tensor, name: str, count: int) -> None:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else "sparse"
        raise DataError(
            "dense tensors with values", f"a {kind} one at {name}", "pad it, or use to_dense()"
        )
    rows = tensor.shape[0] if tensor.dim() else None
    if rows == count:
        return
    found = "no rows" if rows is None else f"{rows:,} rows"
    raise DataError(
        "inputs whose first dimension counts the examples, as that of the targets does",
        f"{found} at {name} for {count:,} examples",
        "graphs and other sets of nodes: pad to [examples, nodes, ...] with a mask; what is the "
        "same for all examples belongs into the model",
    )
