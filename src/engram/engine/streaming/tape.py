r"""The user's own forward and backward pass, taken down: what the tangent pass needs is noted down.

Every operation runs exactly as it would. Inputs of the sites are kept, gradients at their outputs
are read as the user's backward pass comes by, and the operations between the sites are put on a
tape, so that the perturbations t_l of the sites' outputs can be carried forward, op by op, to
:math:`\sum_l (\partial f / \partial z_l) t_l`: with the operation itself where it is linear, with
the kernel of its derivative where that needs only the result, and with a dual number through the
operation otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from engram.core.state.modes_and_buffers import Buffers
from engram.core.state.process import RandomState
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.interception import FunctionMode, tensors
from engram.engine.perturbations import Perturbations
from engram.engine.pooling import average_pool
from engram.engine.prepare import Engine
from engram.engine.rules import RULES, bind
from engram.engine.rules.base import Call, Function
from engram.engine.self_check import ROUNDING
from engram.engine.sites import Site
from engram.errors import EngineError
from engram.linalg.precision import Precision

UPDATE = "use tracker.update() at chosen times instead: it looks at the model in eval mode"

aten = torch.ops.aten
RELUS = {functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
# tangent from the tangent of the input and the result: kernels of the backward pass
BY_RESULT: dict[Function, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys((torch.tanh, functional.tanh, Tensor.tanh), aten.tanh_backward),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, Tensor.sigmoid), aten.sigmoid_backward),
    **dict.fromkeys(RELUS, lambda tangent, result: aten.threshold_backward(tangent, result, 0)),
}
LINEAR: set[Function] = {
    *(torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape, torch.reshape),
    *(Tensor.transpose, Tensor.permute, Tensor.mean, Tensor.sum, Tensor.squeeze),
    *(functional.avg_pool1d, functional.avg_pool2d, functional.adaptive_avg_pool2d),
}
RANDOM: set[Function] = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout),
    *(functional.scaled_dot_product_attention, functional.rrelu, functional.gumbel_softmax),
}


@dataclass(frozen=True)
class Entry:
    """One operation on the tape; ``site`` is its number where a parameter enters."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Tensor, ...]  # the tensors among the arguments
    results: tuple[Tensor, ...]  # those of its results that have a derivative
    places: tuple[int, ...]  # which ones they are
    versions: tuple[int, ...]
    site: int | None
    random: RandomState | None


class Tape(FunctionMode):
    """Notes down the operations on some parameters while :attr:`recording` is set.

    ``obstacle`` says why the tape cannot be used, where it cannot; the user's pass goes on.

    Args:
        engine: the model with its plan.
        num_examples: rows that the batch should have.
    """

    def __init__(self, engine: Engine, num_examples: int) -> None:
        super().__init__()
        self.engine, self.plan, self.num_examples = engine, engine.plan, num_examples
        self.parameters = engine.parameters
        self.name_of = {id(p): name for name, p in self.parameters.items()}
        self.recording = False
        self.buffers: Buffers | None = None  # as they were before the call
        self.obstacle: str | None = None
        if self.plan.units or any(use.kind != "rule" for use in self.plan.uses):
            self.obstacle = "parameters without a rule"
        self.followed: dict[int, Tensor] = {}  # what depends on parameters; ids stay unique
        self.entries: list[Entry] = []
        self.sites: list[Site] = []
        self.gradients: list[Tensor | None] = []
        self._handles: list[RemovableHandle] = []

    def __torch_function__(
        self,
        function: Function,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.recording or self.obstacle is not None:
            return function(*args, **kwargs)
        leaves = tensors((args, kwargs))
        own = any(id(t) in self.name_of for t in leaves)
        if not own and not any(id(t) in self.followed for t in leaves):
            return function(*args, **kwargs)
        before = [t._version for t in leaves]
        random = RandomState.now({t.device for t in leaves}) if function in RANDOM else None
        result = function(*args, **kwargs)
        moving = {place: t for place, t in enumerate(tensors(result)) if t.requires_grad}
        changed = before != [t._version for t in leaves]
        if changed and not (function in RELUS and result is leaves[0]):
            self.obstacle = f"the operation {_name(function)!r}, which works in place"
        elif not torch.is_grad_enabled():
            # inside a function with a backward of its own, or a checkpoint: not what it stands for
            self.obstacle = f"the operation {_name(function)!r} without gradients"
        elif moving:
            results = tuple(moving.values())
            site = self._site(function, args, kwargs, results) if own else None
            versions = tuple(t._version for t in results)
            made = (tuple(leaves), results, tuple(moving), versions, site, random)
            entry = Entry(function, args, kwargs, *made)
            self.entries.append(entry)
            self.followed |= {id(t): t for t in results}
        return result

    def _site(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[Tensor],
    ) -> int | None:
        number = len(self.sites)
        use = self.plan.uses[number] if number < len(self.plan.uses) else None
        bound = bind(function, args, kwargs)
        if use is None or bound is None or use.function != function or use.output is None:
            self.obstacle = f"other operations than in eval mode at {_name(function)!r}"
            return None
        found = {role: self.name_of.get(id(p)) for role, p in bound.parameters.items()}
        roles = {role: name for role, name in found.items() if name is not None}
        dim, multiplicity = use.output
        call = Call(
            bound.input.detach().movedim(dim, 0),
            {role: self.parameters[name].shape for role, name in roles.items()},
            bound.options,
            multiplicity,
        )
        if call.num_examples != self.num_examples or not results[0].requires_grad:
            self.obstacle = f"another number of examples at {_name(function)!r}"
            return None
        edge = get_gradient_edge(results[0])
        version = bound.input._version
        self.sites.append(Site(RULES[function], call, roles, edge, dim, bound.input, version))
        self.gradients.append(None)

        def capture(gradients: tuple[Tensor | None, ...]) -> None:
            arrived = gradients[edge.output_nr]
            self.gradients[number] = None if arrived is None else arrived.detach()

        self._handles.append(edge.node.register_prehook(capture))
        return number

    def begin(self) -> None:
        """The model is called: what runs until ``recording`` is unset is taken down."""
        self._check_mode()
        self.buffers = Buffers.now(self.engine.model)
        self.recording = True

    def _check_mode(self) -> None:
        for module in self.engine.mixing:
            if module.training or module.running_mean is None:
                raise EngineError(
                    "a model that treats the examples of a batch independently in training",
                    f"{type(module).__name__} in train mode, in which no example has a gradient "
                    "of its own",
                    UPDATE,
                )
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            raise EngineError("a step in one precision", "automatic mixed precision", UPDATE)

    def release(self) -> None:
        """Let go of everything: the graph holds the hooks, and the hooks hold the graph."""
        for handle in self._handles:
            handle.remove()
        for kept in (self._handles, self.entries, self.sites, self.gradients, self.followed):
            kept.clear()
        self.buffers = None

    def usable(self) -> bool:
        """Whether nothing stood in the way, and all on it is still as the operations saw it."""
        if self.obstacle is not None:
            return False
        entries = all(
            tuple(t._version for t in entry.results) == entry.versions
            for entry in self.entries
            if entry.function in BY_RESULT
        )
        return entries and all(site.source._version == site.version for site in self.sites)

    def deviation(self, outputs: Tensor, arrived: Tensor, precision: Precision) -> Tensor | None:
        """J S^-1 J' g at these outputs, for the gradient g that arrived there.

        None where something between the sites was not seen: <g, J s> must be <J' g, s>.
        """
        with torch.no_grad():
            arranged = [
                None if g is None else site.arrange(g)
                for site, g in zip(self.sites, self.gradients, strict=True)
            ]
            perturbations = Perturbations(self.sites, arranged, precision, DiscardGradients())
            pulled = outputs.new_zeros(self.num_examples)
            size = torch.zeros_like(pulled)
            pushed = self._push(outputs, perturbations, (pulled, size))
            found = (arrived * pushed).reshape(self.num_examples, -1).sum(1)
            # by rounding alone; an operation that was not seen changes them by far more
            limit = ROUNDING.get(outputs.dtype, ROUNDING[torch.float32]) * size
            seen = any(_makes(entry, outputs) for entry in self.entries)
            if seen and bool(((found - pulled).abs() <= limit).all()):
                return pushed
        self.obstacle = "operations that cannot be seen one by one"
        return None

    def _push(
        self, outputs: Tensor, perturbations: Perturbations, products: tuple[Tensor, Tensor]
    ) -> Tensor:
        last = max((i for i, e in enumerate(self.entries) if _makes(e, outputs)), default=-1)
        entries = self.entries[: last + 1]
        uses = {id(t): i for i, e in enumerate(entries) for t in e.leaves}
        carried: dict[int, Tensor] = {}
        for number, entry in enumerate(entries):
            found = _tangents(entry, carried)
            if entry.site is not None:
                found = [self._with_perturbation(entry.site, found[0], perturbations, products)]
            # memory that is let go here is still in the cache when the next operation asks for it
            for tensor in entry.leaves:
                if uses[id(tensor)] == number:
                    carried.pop(id(tensor), None)
            for result, tangent in zip(entry.results, found, strict=True):
                carried.pop(id(result), None)
                if tangent is not None:
                    carried[id(result)] = tangent
        return carried.get(id(outputs), torch.zeros_like(outputs))

    def _with_perturbation(
        self,
        number: int,
        tangent: Tensor | None,
        perturbations: Perturbations,
        products: tuple[Tensor, Tensor],
    ) -> Tensor | None:
        """What comes from before the site, and the site's own perturbation.

        The products of perturbation and gradient, and their size, are added up for every example.
        """
        perturbation, gradient = perturbations.take(number), perturbations.gradients[number]
        if perturbation is None:
            return tangent
        if gradient is not None:
            own_products = (perturbation * gradient).reshape(self.num_examples, -1)
            products[0].add_(own_products.sum(1))
            products[1].add_(own_products.abs().sum(1))
        own = self.sites[number].restore(perturbation)
        return own if tangent is None else tangent + own


def _makes(entry: Entry, tensor: Tensor) -> bool:
    return any(result is tensor for result in entry.results)


def _name(function: Function) -> str:
    return str(getattr(function, "__name__", function))


def _tangents(entry: Entry, carried: dict[int, Tensor]) -> list[Tensor | None]:
    """Tangents of the results from those of the arguments; None stands for zero."""
    moving = [t for t in entry.leaves if id(t) in carried]
    if not moving:
        return [None] * len(entry.results)
    function = entry.function
    if len(moving) == 1 and entry.args and moving[0] is entry.args[0]:
        tangent = carried[id(moving[0])]
        if function in BY_RESULT:
            return [BY_RESULT[function](tangent, entry.results[0].detach())]
        if function in LINEAR:
            return [_linear(function, tangent, *entry.args[1:], **entry.kwargs)]
        found = _by_rule(entry, tangent)
        if found is not None:
            return [found]
    return _dual(entry, carried)


def _by_rule(entry: Entry, tangent: Tensor) -> Tensor | None:
    """By the rule of the operation, where it has a short way."""
    rule = RULES.get(entry.function)
    if rule is None:
        return None
    return rule.input_tangent(entry.function, entry.args, entry.kwargs, entry.results[0], tangent)


def _linear(function: Function, tangent: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A linear operation on the tangent, by a quicker equal one where there is one."""
    short = average_pool(tangent, *args, **kwargs) if function is functional.avg_pool2d else None
    result: Tensor = function(tangent, *args, **kwargs) if short is None else short
    return result


def _dual(entry: Entry, carried: dict[int, Tensor]) -> list[Tensor | None]:
    """Any other operation, run once more with dual numbers and the same random numbers."""

    def dual(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tangent = carried.get(id(leaf))
        plain = leaf.detach()
        return plain if tangent is None else forward_ad.make_dual(plain, tangent)

    with nullcontext() if entry.random is None else entry.random.again(), forward_ad.dual_level():
        args, kwargs = tree_map(dual, (entry.args, entry.kwargs))
        found = tensors(entry.function(*args, **kwargs))
        return [forward_ad.unpack_dual(found[place]).tangent for place in entry.places]
