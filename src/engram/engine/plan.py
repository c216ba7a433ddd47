"""How each use of a parameter is handled; decided once, before the pass, on two or three examples.

Two runs of the model with different numbers of examples tell which dimension of every tensor
counts examples. Then each operation that a parameter enters is one of:

- ``rule``: the operation has a rule;
- ``copies``: it has none, and is run with one copy of the parameter per example;
- ``derived``: no data enters (a reshaped or normalised weight); its result is followed instead;
- ``expand``: the parameter is laid out once per example (a class token).

What fits none of these makes the smallest module that owns the parameters a *unit*.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engram.batches import Inputs, call
from engram.engine import attention, recurrent
from engram.engine.nested import tensors
from engram.engine.registry import bind
from engram.engine.rules import Function
from engram.engine.units import Unit, replaced
from engram.parameters import trainable

Scaling = tuple[int, int]  # (dimension that counts examples, entries per example)


@dataclass(frozen=True)
class Touch:
    """One operation that a parameter enters, and how to handle it."""

    function: Function
    kind: str
    inputs: tuple[Scaling | None, ...]
    output: Scaling | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The touches in the order in which the model makes them, and its units."""

    touches: tuple[Touch, ...]
    units: dict[str, Unit] = field(default_factory=dict)
    own_kernels: bool = True

    def ways(self) -> dict[str, str]:
        """For each parameter that is used: rule, copies or unit."""
        ways: dict[str, str] = {}
        rank = {"rule": 0, "expand": 0, "derived": 1, "copies": 1, "unit": 2}
        found = [(name, touch.kind) for touch in self.touches for name in touch.names]
        found += [(name, "unit") for unit in self.units.values() for name in unit.names]
        for name, kind in found:
            if rank[kind] >= rank.get(ways.get(name, "rule"), 0):
                ways[name] = {"expand": "rule", "derived": "copies"}.get(kind, kind)
        return ways


class Interceptor(TorchFunctionMode):
    """Sees every operation, opens up attention and recurrence, and is silent inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = False

    def __torch_function__(
        self,
        function: Function,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.silent:
            return function(*args, **kwargs)
        if function is torch.nn.functional.multi_head_attention_forward:
            arguments = dict(zip(attention.SIGNATURE, args, strict=False)) | kwargs
            if attention.applies(arguments):
                with self:
                    return attention.multi_head_attention(arguments)
        if recurrent.applies(function, args):
            with self:
                return recurrent.run(function, args)
        return self.operation(function, args, kwargs)

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        return function(*args, **kwargs)

    def returned(self, unit: Unit, result: Any) -> None:
        """A unit has returned."""

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Operations inside a unit are the unit's own business."""
        self.silent = True
        try:
            yield
        finally:
            self.silent = False


class ShapeLog(Interceptor):
    """The shape of every result, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[torch.Size]] = []

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
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
    """Runs the model on two examples and writes down every touch."""

    def __init__(self, model: nn.Module, log: ShapeLog, known: dict[int, Scaling]) -> None:
        super().__init__()
        self.log = log
        self.parameters = {id(p): (name,) for name, p in trainable(model).items()}
        self.followed: dict[int, tuple[str, ...]] = dict(self.parameters)
        self.known = known
        self.alive: list[Any] = []  # ids stay unique while their tensors live
        self.position = 0
        self.touches: list[Touch] = []
        self.unhandled: list[tuple[str, ...]] = []

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tensors((args, kwargs))
        names = tuple(dict.fromkeys(n for t in leaves for n in self.followed.get(id(t), ())))
        inputs = tuple(self.known.get(id(t)) for t in leaves)
        result = function(*args, **kwargs)
        results = tensors(result)
        shapes = self.log.shapes[self.position] if self.position < len(self.log.shapes) else []
        self.position += 1
        self.alive.append((leaves, results))
        found = [scaling(t.shape, s) for t, s in zip(results, shapes, strict=False)]
        for tensor, scale in zip(results, found, strict=False):
            if scale is not None:
                self.known[id(tensor)] = scale
        if names and results:
            self._touch(function, args, kwargs, leaves, inputs, names, results, found)
        return result

    def returned(self, unit: Unit, result: Any) -> None:
        self.alive.append(result)
        for tensor, dim in zip(tensors(result), unit.output_dims, strict=False):
            if dim is not None:
                self.known[id(tensor)] = (dim, 1)

    def _touch(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Tensor],
        inputs: tuple[Scaling | None, ...],
        names: tuple[str, ...],
        results: list[Tensor],
        found: list[Scaling | None],
    ) -> None:
        kind = self._kind(function, args, kwargs, leaves, inputs, results, found)
        if kind is None:
            self.unhandled.append(names)
            return
        if kind == "derived":
            for tensor in results:
                self.followed.setdefault(id(tensor), names)
        output = found[0] if found else None
        self.touches.append(Touch(function, kind, inputs, output, names))

    def _kind(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Tensor],
        inputs: tuple[Scaling | None, ...],
        results: list[Tensor],
        found: list[Scaling | None],
    ) -> str | None:
        if any(scale is not None and scale[0] < 0 for scale in (*inputs, *found)):
            return None
        if all(scale is None for scale in found):
            return "derived"
        if len(results) != 1 or found[0] is None:
            return None
        if all(scale is None for scale in inputs):
            return self._expand_kind(leaves, results[0])
        bound = bind(function, args, kwargs)
        if bound is not None and self._rule_holds(bound.input, bound.parameters, found[0]):
            return "rule"
        batched = [scale for scale in (*inputs, found[0]) if scale is not None]
        return "copies" if all(scale[1] == 1 for scale in batched) else None

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


def make_plan(model: nn.Module, two: Inputs, three: Inputs, unit_names: set[str]) -> Plan:
    """Decide how every use of a parameter is handled.

    Args:
        model: in eval mode.
        two, three: inputs with two and with three examples.
        unit_names: modules that are to be units from the start.
    """
    with torch.no_grad():
        call(model, three)  # whatever a model builds on its first call is then built
    while True:
        units = {name: Unit.of(model, name) for name in sorted(unit_names)}
        if "" in units:
            return Plan((), units)
        log = ShapeLog()
        with log, replaced(model, units, log):
            call(model, three)
        probe = Probe(model, log, _input_scaling(two, three))
        with probe, replaced(model, units, probe):
            call(model, two)
        mixed = {name for name, unit in units.items() if not unit.separable}
        if not probe.unhandled and not mixed:
            return Plan(tuple(probe.touches), units)
        wanted = {_common_owner(names) for names in probe.unhandled}
        wider = {name.rpartition(".")[0] for name in mixed}
        unit_names = outermost((unit_names - mixed) | wanted | wider)


def outermost(names: set[str]) -> set[str]:
    """Drop modules that lie inside another one of the set."""
    return {
        n for n in names if not any(m != n and (m == "" or n.startswith(m + ".")) for m in names)
    }


def _common_owner(names: tuple[str, ...]) -> str:
    """The innermost module that holds all these parameters."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
