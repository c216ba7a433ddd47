"""A module that is handled as a whole: run for each example with its own copy of the parameters.

This is ``torch.func``'s way (vmap over ``functional_call``), for one module instead of the whole
model, so that the rest of the net keeps its rules. The whole model is the last resort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from engram.core.data.batches import logits_of
from engram.core.parameters import trainable
from engram.engine.interception import Forward, Substitution

if TYPE_CHECKING:
    from engram.engine.interception import Interceptor

# How far rounding may bring apart a module's rows in one order and in the other; a module that
# mixes rows differs by far more.
SAME_ROWS = (1e-3, 1e-5)  # relative to an entry, and absolute

CopyOf = Callable[[str], Tensor]
Single = Callable[..., tuple[Tensor, ...]]
Dims = list[int | None]


@dataclass
class Unit:
    """One module, its trainable parameters, and which dimension of its tensors counts examples."""

    module: nn.Module
    names: tuple[str, ...]  # as the model calls them
    local_names: tuple[str, ...]  # as the module calls them
    input_dims: list[int | None] = field(default_factory=list)
    output_dims: list[int | None] = field(default_factory=list)
    separable: bool = True  # one entry per example wherever examples are counted
    aligned: bool = True  # its rows are the examples in order, coming in and going out
    mapped: bool = True  # all examples at once by vmap, or one after the other
    seen: dict[int, tuple[list[torch.Size], list[torch.Size]]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, path: str) -> Unit:
        """The module at this path; a shared parameter keeps the model's first name for it."""
        module = model.get_submodule(path)
        by_identity = {id(p): name for name, p in trainable(model).items()}
        local = trainable(module)
        return cls(module, tuple(by_identity[id(p)] for p in local.values()), tuple(local))

    def observe(self, run: int, arguments: Any, result: Any) -> None:
        """Remember a run's shapes, and once two batch sizes were seen, what differs."""
        self.seen.setdefault(run, (_shapes(arguments), _shapes(result)))
        if len(self.seen) == 2:
            (in_a, out_a), (in_b, out_b) = self.seen.values()
            if _ranks(in_a) != _ranks(in_b) or _ranks(out_a) != _ranks(out_b):
                self.separable = False
                return
            self.input_dims = [_differing(a, b) for a, b in zip(in_a, in_b, strict=True)]
            self.output_dims = [_differing(a, b) for a, b in zip(out_a, out_b, strict=True)]
            pairs = [*zip(in_a, in_b, strict=True), *zip(out_a, out_b, strict=True)]
            self.separable = all(_one_each(a, b) for a, b in pairs)

    def follows_its_rows(self, forward: Callable[..., Any], arguments: Any, result: Any) -> bool:
        """Whether examples in the opposite order come out in the opposite order.

        What sorts its rows and does not put them back gives one of the two orders for both.
        """
        args, kwargs = _turned(arguments, self.input_dims)
        with torch.no_grad():
            found = _tensors(forward(*args, **kwargs))
        expected = _tensors(_turned(result, self.output_dims))
        return all(torch.allclose(a, b, *SAME_ROWS) for a, b in zip(found, expected, strict=True))

    def run(
        self, forward: Callable[..., Any], copy_of: CopyOf, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """The module's result, computed with one copy of its parameters per example."""
        leaves, tree = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        dims = self.input_dims or [0] * len(where)
        copies = {
            local: copy_of(name) for local, name in zip(self.local_names, self.names, strict=True)
        }
        result_tree: list[Any] = []

        def single(parameters: Mapping[str, Tensor], *data: Tensor) -> tuple[Tensor, ...]:
            filled = list(leaves)
            for position, tensor, dim in zip(where, data, dims, strict=True):
                filled[position] = tensor if dim is None else tensor.unsqueeze(dim)
            inner_args, inner_kwargs = tree_unflatten(filled, tree)
            attributes = vars(self.module)
            replacement, attributes["forward"] = attributes["forward"], forward
            try:
                result = functional_call(self.module, dict(parameters), inner_args, inner_kwargs)
            finally:
                attributes["forward"] = replacement
            out_leaves, out_tree = _flatten_result(result)
            result_tree[:] = [out_tree]
            out = self.output_dims or [0] * len(out_leaves)
            return tuple(
                t if d is None else t.squeeze(d) for t, d in zip(out_leaves, out, strict=True)
            )

        over = self._at_once if self.mapped else self._one_by_one
        found = over(single, dims, copies, [leaves[i] for i in where])
        return tree_unflatten(found, result_tree[0])

    def _at_once(
        self, single: Single, dims: Dims, copies: Mapping[str, Tensor], data: list[Tensor]
    ) -> list[Tensor]:
        out_dims = tuple(d or 0 for d in self.output_dims) if self.output_dims else 0
        mapped = vmap(single, in_dims=(0, *dims), out_dims=out_dims, randomness="same")
        return list(mapped(copies, *data))

    def _one_by_one(
        self, single: Single, dims: Dims, copies: Mapping[str, Tensor], data: list[Tensor]
    ) -> list[Tensor]:
        """What vmap cannot run: operations whose shapes depend on the data, or without a rule."""
        rows = []
        for i in range(len(next(iter(copies.values())))):
            own = {name: copy[i] for name, copy in copies.items()}
            parts = [t if d is None else t.select(d, i) for t, d in zip(data, dims, strict=True)]
            rows.append(single(own, *parts))
        out_dims = [d or 0 for d in self.output_dims] or [0] * len(rows[0])
        columns = zip(*rows, strict=True)
        return [torch.stack(parts, d) for parts, d in zip(columns, out_dims, strict=True)]


def _flatten_result(result: Any) -> tuple[list[Tensor], Any]:
    result = logits_of(result)
    leaves, tree = tree_flatten(result)
    return leaves, tree


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _shapes(tree: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in _tensors(tree)]


def _turned(tree: Any, dims: Dims) -> Any:
    """The examples in the opposite order, wherever they are counted."""
    leaves, structure = tree_flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i, dim in zip(where, dims, strict=True):
        leaves[i] = leaves[i] if dim is None else leaves[i].flip(dim)
    return tree_unflatten(leaves, structure)


def _ranks(shapes: list[torch.Size]) -> list[int]:
    return [len(shape) for shape in shapes]


def _differing(a: torch.Size, b: torch.Size) -> int | None:
    return next((d for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n), None)


def _one_each(three: torch.Size, two: torch.Size) -> bool:
    differing = [(m, n) for m, n in zip(three, two, strict=True) if m != n]
    return differing in ([], [(3, 2)])


class replaced(Substitution):  # noqa: N801 (read as the statement that it is)
    """Run the units in their own way while this lasts; the modules are as before afterwards.

    Without ``copy_of`` the units run plainly and their shapes are observed.
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        mode: Interceptor,
        copy_of: CopyOf | None = None,
    ) -> None:
        super().__init__()
        self.units, self.mode, self.copy_of = units, mode, copy_of

    def substitutes(self) -> Iterator[tuple[nn.Module, Forward]]:
        """The units, each in its own way."""
        for unit in self.units.values():
            own = unit.module.forward
            yield unit.module, _substitute(unit, own, self.mode, self.copy_of)


def _substitute(unit: Unit, forward: Forward, mode: Interceptor, copy_of: CopyOf | None) -> Forward:
    def observed(*args: Any, **kwargs: Any) -> Any:
        mode.silent = True  # operations inside a unit are the unit's own business
        try:
            result = forward(*args, **kwargs)
            unit.observe(id(mode), (args, kwargs), result)
            mode.returned(unit, (args, kwargs), result, forward)
        finally:
            mode.silent = False
        return result

    def per_example(*args: Any, **kwargs: Any) -> Any:
        assert copy_of is not None
        mode.silent = True
        try:
            return unit.run(forward, copy_of, args, kwargs)
        finally:
            mode.silent = False

    return observed if copy_of is None else per_example
