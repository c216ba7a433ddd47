"""Runs the model by a plan and records every site: its rule, its input, its place in the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from engram.core.errors import EngineError
from engram.engine.derived import Derived, in_order
from engram.engine.nested import tensors
from engram.engine.plan import Interceptor, ParameterUse, Plan, Scaling
from engram.engine.pooling import average_pool
from engram.engine.rules import RULES, bind
from engram.engine.rules.base import Call, Function, Rule
from engram.engine.rules.copies import Copies

COPIES = Copies()


@dataclass(frozen=True)
class Site:
    """One place where parameters meet the data.

    ``roles`` maps what a parameter is to the rule ("weight") to its name in the model.
    """

    rule: Rule
    call: Call
    roles: dict[str, str]
    edge: GradientEdge
    dim: int
    source: Tensor
    version: int

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of the model at this site."""
        return tuple(self.roles.values())

    def arrange(self, tensor: Tensor) -> Tensor:
        """From the layout of the operation's output to examples first."""
        return tensor.movedim(self.dim, 0)

    def restore(self, tensor: Tensor) -> Tensor:
        """Back to the layout of the operation's output."""
        return tensor.movedim(0, self.dim)

    def check_fresh(self) -> None:
        """The captured input must still be what the operation saw."""
        if self.source._version != self.version:
            raise EngineError(
                "layer inputs that stay as they are until the backward pass",
                f"an input of {', '.join(self.names)} that was changed in place afterwards",
                "write that operation out of place (x = x + y instead of x += y)",
            )


class Recorder(Interceptor):
    """Follows the plan, touch by touch."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], plan: Plan, num_examples: int
    ) -> None:
        super().__init__()
        self.plan = plan
        self.num_examples = num_examples
        self.parameters = parameters
        self.name_of = {id(p): name for name, p in self.parameters.items()}
        self.derived: dict[int, Derived] = {}
        self.copies: dict[str, Tensor] = {}
        self.own: dict[int, Tensor] = {}  # what was made from parameters, once per example
        self.sites: list[Site] = []
        self.position = 0

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tensors((args, kwargs))
        if not any(id(t) in self.name_of or id(t) in self.derived for t in leaves):
            return self._without_parameters(function, args, kwargs)
        result = None
        if not self._expects(function, leaves):
            result = function(*args, **kwargs)
            if not tensors(result):
                return result
            self._mismatch(function)
        touch = self.plan.touches[self.position]
        self.position += 1
        handler: Callable[..., Any] = {
            "rule": self._by_rule,
            "copies": self._by_copies,
            "derived": self._derive,
            "expand": self._expand,
        }[touch.kind]
        return handler(touch, function, args, kwargs)

    def _expects(self, function: Function, leaves: list[Tensor]) -> bool:
        if self.position >= len(self.plan.touches):
            return False
        touch = self.plan.touches[self.position]
        names = {self.name_of[id(t)] for t in leaves if id(t) in self.name_of}
        return touch.function == function and names <= set(touch.names)

    def check_complete(self) -> None:
        """Every planned operation must have come."""
        if self.position < len(self.plan.touches):
            self._mismatch(self.plan.touches[self.position].function)

    def _mismatch(self, function: Function) -> None:
        raise EngineError(
            "a model that runs the same operations for every batch",
            f"another order of operations at {getattr(function, '__name__', function)!r}",
            "remove branches that depend on the data from forward, and pad sequences to one length",
        )

    def _by_rule(
        self, touch: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        bound = bind(function, args, kwargs)
        assert bound is not None
        assert touch.output is not None
        rule = RULES[function]
        differentiated = self.plan.own_kernels and bound.input.requires_grad
        result = rule.cheaper_call(bound) if differentiated else None
        if result is None:
            result = function(*args, **kwargs)
        if not result.requires_grad:  # under the model's own no_grad: no derivative reaches it
            return result
        roles = {
            role: self.name_of[id(p)]
            for role, p in bound.parameters.items()
            if id(p) in self.name_of
        }
        shapes = {role: self.parameters[name].shape for role, name in roles.items()}
        dim, multiplicity = touch.output
        call = Call(bound.input.detach().movedim(dim, 0), shapes, bound.settings, multiplicity)
        self._check_examples(call.num_examples)
        self.sites.append(
            Site(
                rule,
                call,
                roles,
                get_gradient_edge(result),
                dim,
                bound.input,
                bound.input._version,
            )
        )
        return result

    def _without_parameters(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The operation itself, or an average whose kernels are quicker."""
        if self.plan.own_kernels and function is functional.avg_pool2d:
            pooled = average_pool(*args, **kwargs)
            if pooled is not None:
                return pooled
        return function(*args, **kwargs)

    def _check_examples(self, found: int) -> None:
        if found != self.num_examples:
            raise EngineError(
                f"a batch dimension of {self.num_examples} at every layer",
                f"{found}",
                "keep one row per example inside the model, and pad sequences to one length",
            )

    def copy_of(self, name: str) -> Tensor:
        """The parameter once per example, [B, *shape]; a site of its own."""
        if name not in self.copies:
            parameter = self.parameters[name]
            with torch.enable_grad():  # first used, perhaps, under the model's own no_grad
                copy = parameter.expand(self.num_examples, *parameter.shape)
            self.copies[name] = copy
            call = Call(copy.detach(), {"value": parameter.shape}, {})
            self.sites.append(
                Site(COPIES, call, {"value": name}, get_gradient_edge(copy), 0, copy, copy._version)
            )
        return self.copies[name]

    def _per_example(self, tensor: Tensor) -> Tensor | None:
        """A parameter, or what was made from parameters, once per example; None for data."""
        if id(tensor) in self.name_of:
            return self.copy_of(self.name_of[id(tensor)])
        if id(tensor) not in self.derived:
            return None
        with torch.enable_grad():
            for recipe in in_order(tensor, self.derived, self.own):
                made = self._mapped(recipe.make, recipe.args, recipe.kwargs, None, None)
                self.own[id(recipe.result)] = made
        return self.own[id(tensor)]

    def _mapped(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[Scaling | None, ...] | None,
        output: Scaling | None,
    ) -> Any:
        """The operation for each example by itself, with its own copies of the parameters."""
        leaves, tree = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        scales = inputs or (None,) * len(where)
        values, dims, data_dims = [], [], []
        for position, scale in zip(where, scales, strict=True):
            own = self._per_example(leaves[position])
            values.append(leaves[position] if own is None else own)
            data_dim = scale[0] if scale is not None and own is None else None
            data_dims.append(data_dim)
            dims.append(0 if own is not None else data_dim)

        def single(*parts: Tensor) -> Tensor:
            filled = list(leaves)
            for position, part, dim in zip(where, parts, data_dims, strict=True):
                filled[position] = part if dim is None else part.unsqueeze(dim)
            inner_args, inner_kwargs = tree_unflatten(filled, tree)
            result: Tensor = function(*inner_args, **inner_kwargs)
            return result if output is None else result.squeeze(output[0])

        out_dim = 0 if output is None else output[0]
        return vmap(single, in_dims=tuple(dims), out_dims=out_dim)(*values)

    def _by_copies(
        self, touch: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._mapped(function, args, kwargs, touch.inputs, touch.output)

    def _derive(
        self, touch: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = function(*args, **kwargs)
        for index, tensor in enumerate(tensors(result)):
            # an operation that had nothing to do gives its argument back: no new tensor, no recipe
            known = id(tensor) in self.name_of or id(tensor) in self.derived
            if tensor.requires_grad and not known:
                self.derived[id(tensor)] = Derived(tensor, function, args, kwargs, index)
        return result

    def _expand(
        self, touch: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        source = next(
            t for t in tensors((args, kwargs)) if id(t) in self.name_of or id(t) in self.derived
        )
        own = self._per_example(source)
        assert own is not None
        return own.reshape(self.num_examples, *source.shape[1:])
