"""Whether the rows of a tensor are still the examples of the batch, in their order.

Shapes cannot tell: a batch sorted by its own values has the shape that it had. On a few examples
that happen to be in order even the gradients agree, and later ones would go to other examples.
So what picks or reorders rows by the data itself is found by the operation, and what is computed
from it is not taken apart by example any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from engram.engine.rules.base import Function

DimensionOf = Callable[[Tensor], int | None]  # which one counts examples

CONSTANT = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
}
FIRST_ONLY = {"to", "type_as", "view_as", "reshape_as", "expand_as"}
INDEXED = {
    *("index_select", "gather", "take_along_dim", "index_add", "index_copy", "index_fill"),
    *("index_reduce", "scatter", "scatter_add", "scatter_reduce"),
}
ALONG = {"sort", "argsort", "topk", "kthvalue", "unbind", "select", "split", "chunk"}
DEFAULTS = {"sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1}
ALWAYS = {
    *("masked_select", "masked_scatter", "nonzero", "unique", "index_put", "take", "msort"),
    *("_pack_padded_sequence", "_pad_packed_sequence"),
}


class Alignment:
    """Follows what comes from the data, and what of it has lost the order of the examples.

    Args:
        inputs: the tensors that the model is called with.
        dimension_of: which dimension of a tensor counts examples, where that is known.
    """

    def __init__(self, inputs: Iterable[Tensor], dimension_of: DimensionOf) -> None:
        self.dimension_of = dimension_of
        self._from_data = {id(t) for t in inputs}
        self._lost: set[int] = set()

    def lost(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of them has rows that no longer stand for the examples in order."""
        return any(id(t) in self._lost for t in tensors)

    def found(self, tensors: Iterable[Tensor]) -> None:
        """Their rows were seen to stand for the examples in order, whatever the operations."""
        self._lost -= {id(t) for t in tensors}

    def note(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Tensor],
        made: Sequence[Tensor],
    ) -> bool:
        """One operation: its tensors, and those that it made or changed.

        Returns:
            Whether it picks or reorders rows by the data.
        """
        name = str(getattr(function, "__name__", ""))
        if not name.startswith("__"):
            name = name.removesuffix("_")  # in place, or not
        sources = leaves[:1] if name in FIRST_ONLY else leaves
        if name in CONSTANT or not any(id(t) in self._from_data for t in sources):
            return False
        self._from_data |= {id(t) for t in made}
        reorders = self._reorders(name, args, kwargs)
        if reorders or self.lost(sources):
            self._lost |= {id(t) for t in made}
        return reorders

    def _reorders(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in ALWAYS or (name == "where" and len(args) + len(kwargs) == 1):
            return True
        source = args[0] if args else kwargs.get("input")
        if not isinstance(source, Tensor):
            return False
        dim = self.dimension_of(source)
        if dim is None:
            return False
        if name in ("__getitem__", "__setitem__"):
            entry = _entry(args[1], dim, source.dim())
            return isinstance(entry, (int, list)) or self._by_data(entry)
        if name in INDEXED:
            tensors = [t for t in (*args[1:], *kwargs.values()) if isinstance(t, Tensor)]
            return _dimension(name, args, kwargs, source) == dim and any(
                self._by_data(t) for t in tensors if not t.is_floating_point()
            )
        return name in ALONG and _dimension(name, args, kwargs, source) == dim

    def _by_data(self, index: Any) -> bool:
        return isinstance(index, Tensor) and id(index) in self._from_data


def _dimension(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor) -> int:
    """Along which dimension the operation works."""
    whole = [a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)]
    found = kwargs.get("dim")
    if found is None:
        if name in ("topk", "split", "chunk", "kthvalue"):  # a number comes first
            whole = whole[1:]
        found = whole[0] if whole else DEFAULTS.get(name, 0)
    return int(found) % max(source.dim(), 1)


def _entry(index: Any, dim: int, rank: int) -> Any:
    """What an index says of one dimension; None where it says nothing."""
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_width(e) for e in entries if e is not None and e is not Ellipsis)
    position = 0
    for entry in entries:
        if entry is None:
            continue
        if entry is Ellipsis:
            position += rank - taken
            continue
        if position <= dim < position + _width(entry):
            return entry
        position += _width(entry)
    return None


def _width(entry: Any) -> int:
    """How many dimensions an entry of an index speaks of: a mask speaks of its own."""
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
