"""The forms that data comes in, and what goes into a model.

Data is a data set of examples, or tensors with a row per example. What goes into the model are
tensors with one row per example, alone or nested in tuples and dicts; targets stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SequenceKey, tree_flatten_with_path, tree_leaves, tree_map_only

from engram.errors import DataError, brief

Data = Any  #: whatever a user calls data; :class:`engram.core.data.batches.Batches` reads it
Inputs = Any  #: a tuple of positional arguments or a dict of named ones
LABEL_KEYS = ("labels", "label", "targets", "target")  # of a dict batch: the first that is there
PLAIN = (bool, int, float, str, type(None))  # inputs that are the same for every example


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


def is_dataset(data: Data) -> bool:
    """Indexable, and not a tuple of arrays that would be read as a list of examples."""
    indexable = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    listed = isinstance(data, (tuple, list))
    arrays = listed and any(hasattr(part, "shape") for part in data)
    other = isinstance(data, (str, bytes, Mapping)) or hasattr(data, "shape")
    return indexable and not arrays and not other


def is_table(data: Data, labelled: bool = True) -> bool:
    """Tensors with a row per example: inputs, nested perhaps, and targets; or a dict of them."""
    if isinstance(data, dict):
        return len(data) > 0 and all(isinstance(v, Tensor) for v in tree_leaves(data))
    fewest = 2 if labelled else 1
    if not isinstance(data, (tuple, list)) or len(data) < fewest:
        return False
    return isinstance(data[-1], Tensor) and all(isinstance(t, Tensor) for t in tree_leaves(data))


def length_of(dataset: Any) -> int:
    """How many examples a data set says it has."""
    try:
        return len(dataset)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise DataError(
            "a data set with a length", brief(error), "have __len__ return the number of examples"
        ) from error


def common_length(tensors: Sequence[Tensor]) -> int:
    """The first dimension that all have, or a DataError."""
    lengths = {len(t) if t.dim() else 0 for t in tensors}
    if len(lengths) != 1:
        raise DataError(
            "inputs and targets with one row per example each",
            f"lengths {sorted(lengths)}",
            "give tensors of the same first dimension",
        )
    return lengths.pop()


def parts(item: Any, labelled: bool = True) -> tuple[Any, Any]:
    """Inputs as a tuple of arguments or a dict of named ones, and targets, or None."""
    if isinstance(item, dict):
        key = next((k for k in LABEL_KEYS if k in item), None)
        if key is None and not labelled:
            return item, None
        if key is None:
            raise DataError(
                f"a dict batch with one of the keys {LABEL_KEYS}", f"{sorted(item)}", "add labels"
            )
        return {k: v for k, v in item.items() if k != key}, item[key]
    if not labelled and isinstance(item, Tensor):
        return (item,), None
    if not labelled and isinstance(item, (tuple, list)) and len(item) == 1:
        return tuple(item), None
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise DataError(
            "examples (x, y), or dicts with labels", type(item).__name__, "return inputs and target"
        )
    *first, targets = item
    only = first[0]
    if len(first) == 1 and isinstance(only, dict):
        return only, targets
    if len(first) == 1 and isinstance(only, (tuple, list)) and tensors_of(only):
        return tuple(only), targets
    return tuple(first), targets
