"""The forms that data comes in: a data set, tensors with a row per example, items with targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from engram.core.data.inputs import tensors_of
from engram.core.errors import DataError, brief

Data = Any
LABEL_KEYS = ("labels", "label", "targets", "target")


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
