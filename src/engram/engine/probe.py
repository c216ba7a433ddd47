"""Two runs of the model that tell how every operation with a parameter can be handled.

Shapes with two and with three examples say which dimension counts them. They cannot say whether the
rows are still the examples in their order: a batch sorted by its own values has the shape that it
had, and on a few examples that happen to be in order even the gradients agree, while later ones
would go to other examples. So :class:`Alignment` finds what picks or reorders rows by the data from
the operations themselves, and what is computed from it is not taken apart by example any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from engram.core.data.batches import Inputs
from engram.core.parameters import trainable
from engram.engine.interception import Interceptor, Paths, tensors
from engram.engine.plan import ParameterUse, Scaling
from engram.engine.rules import RULES, bind
from engram.engine.rules.base import Function
from engram.engine.units import Unit

DimensionOf = Callable[[Tensor], int | None]  # which one counts examples

# Names of operations, without the underscore of those that work in place, by what they do to rows.
# Results that have the shape of their argument, and none of its values:
CONSTANT = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
}
# values of the first argument alone:
FIRST_ONLY = {"to", "type_as", "view_as", "reshape_as", "expand_as"}
# rows picked or filled by an index:
INDEXED = {
    *("index_select", "gather", "take_along_dim", "index_add", "index_copy", "index_fill"),
    *("index_reduce", "scatter", "scatter_add", "scatter_reduce"),
}
# rows taken apart or ordered along a dimension, and the one it is where none is named:
ALONG = {"sort", "argsort", "topk", "kthvalue", "unbind", "select", "split", "chunk"}
DEFAULTS = {"sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1}
# rows picked by the data whatever the arguments:
ALWAYS = {
    *("masked_select", "masked_scatter", "nonzero", "unique", "index_put", "take", "msort"),
    *("_pack_padded_sequence", "_pad_packed_sequence"),
}


@dataclass(frozen=True)
class Operation:
    """One operation as the probe has seen it.

    Args:
        function, args, kwargs: what was called.
        leaves: tensors among the arguments.
        inputs: which dimension of each counts examples.
        names: of the parameters that enter.
        results: tensors that came out.
        found: which dimension of each counts examples.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]
    inputs: tuple[Scaling | None, ...]
    names: tuple[str, ...]
    results: list[Tensor]
    found: list[Scaling | None]


class ShapeLog(Interceptor):
    """Every operation and the shapes of its results, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Function] = []
        self.shapes: list[list[torch.Size]] = []

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self.functions.append(function)
        self.shapes.append([t.shape for t in tensors(result)])
        return result


def scaling(two: torch.Size, three: torch.Size) -> Scaling | None:
    """Which dimension counts examples, from the shapes with two and with three of them."""
    if len(two) != len(three):
        return (-1, 0)
    differing = [d for d, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if not differing:
        return None
    dim = differing[0]
    per_example, rest = divmod(two[dim], 2)
    if len(differing) > 1 or rest or three[dim] != 3 * per_example:
        return (-1, 0)  # grows with the batch in a way that no example owns
    return (dim, per_example)


class Probe(Interceptor):
    """Runs the model on two examples and writes down every use of a parameter."""

    def __init__(
        self, model: nn.Module, log: ShapeLog, paths: Paths, inputs: Inputs, three: Inputs
    ) -> None:
        super().__init__()
        self.log, self.paths = log, paths
        self.reordering: set[str] = set()  # modules that pick or sort rows by the data
        self.behind = False  # whether parameters, or units, come after such rows
        self.same_operations = True  # whatever the number of examples
        self.alignment = Alignment(tensors(inputs), self._dimension_of)
        self.parameters = {id(p): (name,) for name, p in trainable(model).items()}
        self.followed: dict[int, tuple[str, ...]] = dict(self.parameters)
        self.without_rule = dict(self.followed)  # what of these had no rule on the way
        self.known = _input_scaling(inputs, three)
        self.alive: list[Any] = []  # ids stay unique while their tensors live
        self.position = 0
        self.uses: list[ParameterUse] = []
        self.unhandled: list[tuple[str, ...]] = []

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tensors((args, kwargs))
        names = tuple(dict.fromkeys(n for t in leaves for n in self.followed.get(id(t), ())))
        inputs = tuple(self.known.get(id(t)) for t in leaves)
        result, changed = self._run(function, args, kwargs, leaves)
        results = tensors(result)
        here = slice(self.position, self.position + 1)
        self.same_operations &= self.log.functions[here] == [function]
        shapes = next(iter(self.log.shapes[here]), [])
        self.position += 1
        found = [scaling(t.shape, s) for t, s in zip(results, shapes, strict=False)]
        for tensor, scale in zip(results, found, strict=False):
            if scale is not None:
                self.known[id(tensor)] = scale
        if self.alignment.note(function, args, kwargs, leaves, [*results, *changed]):
            self.reordering.add(self.paths.innermost)
        if names and (results or changed):
            # what is changed in place, or runs inside of vmap or grad, has no recipe of its own
            batched = any(scale is not None for scale in (*inputs, *found))
            own = bool(results) and (batched or not changed)
            if own and not any(map(is_functorch_wrapped_tensor, (*leaves, *results))):
                called = (function, args, kwargs, leaves, inputs, names, results, found)
                self._note_use(Operation(*called))
            else:
                self.unhandled.append(names)
        return result

    def _run(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Tensor],
    ) -> tuple[Any, list[Tensor]]:
        """The result, and which of the arguments were changed in place."""
        before = [t._version for t in leaves]
        result = function(*args, **kwargs)
        self.alive.append((leaves, result))
        changed = [t for t, version in zip(leaves, before, strict=True) if t._version != version]
        return result, changed

    def unseen(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tensors((args, kwargs))
        result, changed = self._run(function, args, kwargs, leaves)
        self.alignment.note(function, args, kwargs, leaves, [*tensors(result), *changed])
        return result

    def _dimension_of(self, tensor: Tensor) -> int | None:
        scale = self.known.get(id(tensor))
        if scale is None:
            return 0 if self.silent else None
        return scale[0]

    def returned(self, unit: Unit, arguments: Any, result: Any, forward: Function) -> None:
        self.alive.append(result)
        if self.alignment.lost(tensors(arguments)):
            self.behind = True
            unit.aligned = False
        elif self.alignment.lost(tensors(result)):
            # rows that were moved inside, and perhaps moved back
            if unit.separable and unit.follows_its_rows(forward, arguments, result):
                self.alignment.found(tensors(result))
            else:
                unit.aligned = False
        for tensor, dim in zip(tensors(result), unit.output_dims, strict=False):
            if dim is not None:
                self.known[id(tensor)] = (dim, 1)

    def _note_use(self, seen: Operation) -> None:
        kind = self._kind(seen)
        if kind is None:
            self.unhandled.append(seen.names)
            return
        own = [n for t in seen.leaves for n in self.without_rule.get(id(t), ())]
        names = tuple(dict.fromkeys(own))
        if kind in ("derived", "constant"):
            for tensor in seen.results:
                if tensor.requires_grad:  # else no derivative goes through it
                    self.followed.setdefault(id(tensor), seen.names)
                    self.without_rule.setdefault(id(tensor), () if kind == "constant" else names)
        output = seen.found[0] if seen.found else None
        self.uses.append(ParameterUse(seen.function, kind, seen.inputs, output, names))

    def _kind(self, seen: Operation) -> str | None:
        if any(scale is not None and scale[0] < 0 for scale in (*seen.inputs, *seen.found)):
            return None
        if self.alignment.lost((*seen.leaves, *seen.results)):
            self.behind = True
            return None
        if all(scale is None for scale in seen.found):
            return "constant" if self._is_constant(seen) else "derived"
        output = seen.found[0]
        if len(seen.results) != 1 or output is None:
            return None
        if all(scale is None for scale in seen.inputs):
            return self._expand_kind(seen.leaves, seen.results[0])
        bound = bind(seen.function, seen.args, seen.kwargs)
        if bound is not None and self._rule_holds(bound.input, bound.parameters, output):
            return "rule"
        batched = [scale for scale in (*seen.inputs, output) if scale is not None]
        return "copies" if all(scale[1] == 1 for scale in batched) else None

    def _is_constant(self, seen: Operation) -> bool:
        """Whether a rule is for the operation, and its input the same for every example."""
        bound = bind(seen.function, seen.args, seen.kwargs)
        return (
            bound is not None
            and RULES[seen.function].takes_leading
            and id(bound.input) not in self.followed
            and all(id(p) in self.parameters for p in bound.parameters.values())
        )

    def _rule_holds(self, data: Tensor, roles: dict[str, Tensor], output: Scaling) -> bool:
        scale = self.known.get(id(data))
        direct = all(id(p) in self.parameters or id(p) not in self.followed for p in roles.values())
        if scale is None or not direct or id(data) in self.parameters:
            return False
        trailing = scale[0] == data.dim() - 1 and data.is_floating_point()
        return scale == output and not trailing and (scale[0] == 0 or scale[1] == 1)

    def _expand_kind(self, leaves: list[Tensor], result: Tensor) -> str | None:
        followed = [t for t in leaves if id(t) in self.followed]
        source = followed[0]
        fits = len(followed) == 1 and source.dim() > 0 and source.shape[0] == 1
        return "expand" if fits and result.shape == (2, *source.shape[1:]) else None


def _input_scaling(two: Inputs, three: Inputs) -> dict[int, Scaling]:
    pairs = zip(tensors(two), tensors(three), strict=True)
    found = {id(a): scaling(a.shape, b.shape) for a, b in pairs}
    return {key: scale for key, scale in found.items() if scale is not None}


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
