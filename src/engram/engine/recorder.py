"""Runs the model by a plan and records every site: its rule, its input, its place in the graph.

The operations come in the order of the plan's parameter uses. One with a rule is run as it is and
noted down as a site. One without is run with a copy of its parameters per example, and the copies
are the site. What is made from parameters alone (a reshaped weight, say) is kept as a recipe, and
made once per example only where such a copy is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import vmap
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from engram.engine.interception import Interceptor, tensors
from engram.engine.plan import ParameterUse, Plan, Scaling
from engram.engine.pooling import average_pool
from engram.engine.rules import RULES, bind
from engram.engine.rules.base import Bound, Call, Function, Rule
from engram.engine.rules.copies import Copies
from engram.engine.sites import Site
from engram.errors import EngineError

COPIES = Copies()


@dataclass(frozen=True)
class Derived:
    """A tensor made from parameters alone, with the recipe to make it once per example."""

    result: Tensor  # held, so that its identity stays its own
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    constant: bool = False  # whether a rule is for it, with an input that all examples share

    def make(self, *args: Any, **kwargs: Any) -> Tensor:
        """The tensor from other arguments."""
        return tensors(self.function(*args, **kwargs))[self.index]


def in_order(
    tensor: Tensor, recipes: Mapping[int, Derived], made: Collection[int]
) -> list[Derived]:
    """The recipes that a tensor needs and that are not yet made, what they are made from first.

    Each comes once, however often it is used, and a long chain needs no deep recursion. A recipe
    is made from tensors that were there before it, so there is no circle to walk in.
    """
    needed: dict[int, Derived] = {}
    waiting = [tensor]
    while waiting:
        key = id(waiting.pop())
        if key in recipes and key not in needed and key not in made:
            needed[key] = recipes[key]
            waiting += tensors((recipes[key].args, recipes[key].kwargs))
    return [recipe for key, recipe in recipes.items() if key in needed]


class OtherOperationsError(EngineError):
    """A batch that the plan does not fit."""


class Recorder(Interceptor):
    """Follows the plan, from one use of a parameter to the next."""

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
        use = self.plan.uses[self.position]
        self.position += 1
        handler: Callable[..., Any] = {
            "rule": self._by_rule,
            "copies": self._by_copies,
            "derived": self._derive,
            "constant": self._derive,
            "expand": self._expand,
        }[use.kind]
        return handler(use, function, args, kwargs)

    def _expects(self, function: Function, leaves: list[Tensor]) -> bool:
        if self.position >= len(self.plan.uses):
            return False
        use = self.plan.uses[self.position]
        names = {self.name_of[id(t)] for t in leaves if id(t) in self.name_of}
        return use.function == function and names <= set(use.names)

    def check_complete(self) -> None:
        """Every planned operation must have come."""
        if self.position < len(self.plan.uses):
            self._mismatch(self.plan.uses[self.position].function)

    def _mismatch(self, function: Function) -> None:
        raise OtherOperationsError(
            "a model that runs the same operations for every batch",
            f"another order of operations at {getattr(function, '__name__', function)!r}",
            "remove branches that depend on the data from forward, and pad sequences to one length",
        )

    def _by_rule(
        self, use: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        bound = bind(function, args, kwargs)
        assert bound is not None
        assert use.output is not None
        rule = RULES[function]
        differentiated = self.plan.own_kernels and bound.input.requires_grad
        result = rule.cheaper_call(bound) if differentiated else None
        if result is None:
            result = function(*args, **kwargs)
        if result.requires_grad:  # else under the model's own no_grad: no derivative reaches it
            self._add_site(rule, bound, result, use.output)
        return result

    def _add_site(self, rule: Rule, bound: Bound, result: Tensor, scale: Scaling) -> None:
        roles = {
            role: self.name_of[id(p)]
            for role, p in bound.parameters.items()
            if id(p) in self.name_of
        }
        shapes = {role: self.parameters[name].shape for role, name in roles.items()}
        dim, multiplicity = scale
        call = Call(bound.input.detach().movedim(dim, 0), shapes, bound.options, multiplicity)
        self._check_examples(call.num_examples)
        edge, version = get_gradient_edge(result), bound.input._version
        self.sites.append(Site(rule, call, roles, edge, dim, bound.input, version))

    def _laid_out(self, recipe: Derived) -> Tensor:
        """The operation on its input once per example, [B, ...], as a site of its rule."""
        bound = bind(recipe.function, recipe.args, recipe.kwargs)
        assert bound is not None
        shared = bound.input
        laid_out = replace(bound, input=shared.expand(self.num_examples, *shared.shape))

        def put(leaf: Any) -> Any:
            return laid_out.input if leaf is shared else leaf

        args, kwargs = tree_map(put, (recipe.args, recipe.kwargs))
        result: Tensor = recipe.function(*args, **kwargs)
        self._add_site(RULES[recipe.function], laid_out, result, (0, 1))
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
                self.own[id(recipe.result)] = (
                    self._laid_out(recipe)
                    if recipe.constant
                    else self._mapped(recipe.make, recipe.args, recipe.kwargs, None, None)
                )
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
        self, use: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._mapped(function, args, kwargs, use.inputs, use.output)

    def _derive(
        self, use: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = function(*args, **kwargs)
        for index, tensor in enumerate(tensors(result)):
            # an operation that had nothing to do gives its argument back: no new tensor, no recipe
            known = id(tensor) in self.name_of or id(tensor) in self.derived
            if tensor.requires_grad and not known:
                constant = use.kind == "constant"
                self.derived[id(tensor)] = Derived(tensor, function, args, kwargs, index, constant)
        return result

    def _expand(
        self, use: ParameterUse, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        source = next(
            t for t in tensors((args, kwargs)) if id(t) in self.name_of or id(t) in self.derived
        )
        own = self._per_example(source)
        assert own is not None
        return own.reshape(self.num_examples, *source.shape[1:])
