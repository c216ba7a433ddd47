"""Everything before the first batch: a plan that was checked, on a model left as it was.

The model is probed on two and three examples (:func:`make_plan`), the plan run in the quickest form
that the model allows, and its per-example gradients held against autograd's. Where they differ, or
the model cannot be taken apart, the modules concerned become units: as small as can be and as wide
as must be. The :class:`Engine` is the model with the plan that passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from engram.core.data.batches import Batch, Batches, Inputs, call
from engram.core.parameters import check_finite_weights, count, frozen, trainable
from engram.core.state.model import device_of
from engram.engine.interception import Paths
from engram.engine.passes import Trace, trace
from engram.engine.plan import Plan
from engram.engine.probe import Probe, ShapeLog
from engram.engine.refusals import (
    check_decoder,
    check_independent,
    check_kinds,
    named_failures,
    pass_on,
)
from engram.engine.self_check import Expected, disagreements, has_true_hessian, no_second_derivative
from engram.engine.units import Unit, replaced
from engram.errors import EngineError

BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Coverage:
    """Which parameters went which way.

    ``exact`` counts the entries handled by a rule, ``fallback`` those by per-example copies or
    ``torch.func``, ``frozen`` those that are fixed, ``unused`` those that no output depends on.
    """

    ways: dict[str, str]
    exact: int
    fallback: int
    frozen: int
    unused: int

    @property
    def total(self) -> int:
        """Entries of all parameters of the model."""
        return self.exact + self.fallback + self.frozen + self.unused


def training_layers(model: nn.Module) -> list[str]:
    """Kinds of layers in train mode that behave otherwise in eval mode."""
    kinds = (BatchNorm, nn.modules.dropout._DropoutNd)
    found = (m for m in model.modules() if isinstance(m, kinds) and m.training)
    return sorted({type(module).__name__ for module in found})


def not_estimated(model: nn.Module) -> tuple[str, ...]:
    """What training does with these layers and an estimate in eval mode does not, in words."""
    modules = list(model.modules())
    found = []
    if any(isinstance(m, BatchNorm) and m.running_mean is not None for m in modules):
        found.append(
            "batch normalisation by its running statistics: an example's own part in them, and in "
            "those of its batches, is left out"
        )
    if any(_drops(module) for module in modules):
        found.append("dropout is left out: estimated without it, as predictions are made")
    return tuple(found)


def _drops(module: nn.Module) -> bool:
    """Whether a layer drops something in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


@dataclass(frozen=True)
class Engine:
    """A model with the plan for its passes."""

    model: nn.Module
    plan: Plan
    coverage: Coverage
    parameters: dict[str, nn.Parameter]
    doubtful: tuple[str, ...] = ()  # functions whose second derivative may lack a part
    true_hessian: bool = True  # whether the second derivatives through them are right
    mixing: tuple[BatchNorm, ...] = ()  # layers that mix the examples of a batch in train mode
    others: list[Plan] = field(default_factory=list)  # of batches with other operations

    def fits(self, model: nn.Module) -> bool:
        """Whether the model is the one that was planned for, or a copy of it."""
        kinds = [type(module) for module in self.model.modules()]
        return kinds == [type(module) for module in model.modules()] and {
            name: p.shape for name, p in self.parameters.items()
        } == {name: p.shape for name, p in trainable(model).items()}

    def moved_to(self, model: nn.Module) -> Engine:
        """The same plan for a copy of the model, at whatever weights."""
        check_finite_weights(model)
        units = {
            path: replace(unit, module=model.get_submodule(path))
            for path, unit in self.plan.units.items()
        }
        plan = replace(self.plan, units=units)
        return replace(self, model=model, plan=plan, parameters=trainable(model), others=[])

    def trace(self, batch: Batch) -> Trace:
        """Forward pass over a batch, recorded."""
        return trace(self.model, self.plan, batch.inputs, len(batch), self.parameters)

    def check_twice(self) -> None:
        """EngineError where second derivatives are wanted and the model has none."""
        if not self.plan.twice:
            raise no_second_derivative(self.doubtful)

    def check_hessian(self) -> None:
        """EngineError where the Hessian is wanted and autograd's lacks a part."""
        if not self.plan.twice or not self.true_hessian:
            raise no_second_derivative(self.doubtful)


def prepare(model: nn.Module, batches: Batches) -> Engine:
    """Plan the passes on the first examples and check the plan against plain autograd.

    Call inside :func:`engram.core.state.model.state_preserved`.
    """
    with named_failures("on the first examples of the data and can be differentiated twice"):
        return _prepare(model, batches)


def prepare_again(planned: Engine, model: nn.Module, batches: Batches) -> Engine:
    """An engine for a copy of a model that was planned before, at whatever weights.

    Its plan serves again if it still gives autograd's gradients: a flag that training has changed,
    say, can make another model of the same modules. Else there is a new plan.
    """
    if planned.fits(model):
        engine, probe = planned.moved_to(model), first_examples(model, batches)
        try:
            if not disagreements(model, engine.plan, probe, Expected.of(model, probe))[0]:
                return engine
        except Exception as error:  # what the plan cannot run is planned anew
            pass_on(error)
    return prepare(model, batches)


def first_examples(model: nn.Module, batches: Batches) -> Batch:
    """The first examples, three of them, however few there are."""
    first = batches.take(torch.arange(min(3, batches.num_data)))
    positions = torch.arange(3) % len(first)
    return first.select(positions).to(device_of(model))


def _prepare(model: nn.Module, batches: Batches) -> Engine:
    parameters = trainable(model)
    check_kinds(model)
    check_finite_weights(model)
    probe = first_examples(model, batches)
    check_decoder(model, probe)
    check_independent(model, probe)
    expected = Expected.of(model, probe)
    plan, used = _checked_plan(model, probe, expected)
    functions, coverage = tuple(expected.functions), _coverage(model, plan, used)
    curved = has_true_hessian(model, probe, expected)
    mixing = tuple(module for module in model.modules() if isinstance(module, BatchNorm))
    return Engine(model, plan, coverage, parameters, functions, curved, mixing)


def _checked_plan(model: nn.Module, probe: Batch, expected: Expected) -> tuple[Plan, set[str]]:
    """The narrowest plan whose gradients are autograd's; units only widen, so the search ends."""
    units: set[str] = set()
    for _ in range(rounds(model)):
        plan = first_plan(model, probe, units)
        checked, wrong, used = runnable(model, plan, probe, expected)
        if not wrong:
            return checked, used
        if set(plan.units) == {""}:
            break
        units = outermost(set(plan.units) | {_wider(name, set(plan.units)) for name in wrong})
    checked, wrong, used = runnable(model, _one_by_one(whole_model(model)), probe, expected)
    if wrong:
        raise EngineError(
            "per-example gradients that agree with autograd",
            f"other gradients of {wrong[0]!r}, even with each example by itself",
            "take away hooks that change gradients, and functions whose backward is none of theirs",
        )
    return checked, used


def first_plan(model: nn.Module, probe: Batch, units: set[str]) -> Plan:
    """A plan with these units, whose gradients nobody has checked yet."""
    try:
        return make_plan(model, probe.select(slice(0, 2)).inputs, probe.inputs, units)
    except Exception as error:  # the model itself runs: what failed is seen, or not, as a whole
        pass_on(error)
        return whole_model(model)


def make_plan(model: nn.Module, two: Inputs, three: Inputs, unit_names: set[str]) -> Plan:
    """Decide how every use of a parameter is handled.

    Units only ever widen, so the rounds are few; after them the whole model is one.

    Args:
        model: in eval mode.
        two, three: inputs with two and with three examples.
        unit_names: modules that are to be units from the start.
    """
    with torch.no_grad():
        call(model, three)  # whatever a model builds on its first call is then built
    for _ in range(rounds(model)):
        if "" in unit_names:
            break
        units = {name: Unit.of(model, name) for name in sorted(unit_names)}
        log = ShapeLog()
        with torch.enable_grad(), log, replaced(units, log):
            call(model, three)
        with Paths(model) as paths:
            probe = Probe(model, log, paths, two, three)
            with torch.enable_grad(), probe, replaced(units, probe):
                call(model, two)
        mixed = {name for name, unit in units.items() if not unit.separable}
        if probe.behind and (probe.reordering or mixed):
            # what comes after rows that a module has moved is looked at once that is a unit
            unit_names = outermost((unit_names - mixed) | probe.reordering | around(mixed))
            continue
        mixed |= {name for name, unit in units.items() if not unit.aligned}
        wanted = {_common_owner(names) for names in probe.unhandled}
        if not wanted and not mixed and probe.same_operations:
            return Plan(tuple(probe.uses), units)
        # a unit that still leaves something open, because nobody calls it, gives no more than this
        open_still = {unit for unit in units for name in wanted if lies_in(name, unit)}
        wider = around(mixed | open_still)
        if not wanted and not wider:  # the number of examples decides which operations there are
            break
        unit_names = outermost((unit_names - mixed) | wanted | wider)
    return whole_model(model)


def rounds(model: nn.Module) -> int:
    """How often units can widen until nothing is left to widen: twice for every level."""
    return 2 * max(name.count(".") + 1 for name, _ in model.named_modules()) + 2


def whole_model(model: nn.Module) -> Plan:
    """The whole model as one unit: the last resort."""
    return Plan((), {"": Unit.of(model, "")})


def around(names: set[str]) -> set[str]:
    """The modules around these."""
    return {name.rpartition(".")[0] for name in names}


def lies_in(name: str, module: str) -> bool:
    """Whether a module is another one, or inside of it."""
    return module in ("", name) or name.startswith(module + ".")


def outermost(names: set[str]) -> set[str]:
    """Drop modules that lie inside another one of the set."""
    return {n for n in names if not any(m != n and lies_in(n, m) for m in names)}


def _common_owner(names: tuple[str, ...]) -> str:
    """The innermost module that holds all these parameters."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def runnable(
    model: nn.Module, plan: Plan, probe: Batch, expected: Expected
) -> tuple[Plan, list[str], set[str]]:
    """The plan in the first form that runs, with what :func:`disagreements` says of it.

    A checkpoint runs the model again in its backward pass and wants the same operations, so our
    own kernels are left out; what cannot be differentiated twice takes a backward pass for every
    output; what vmap cannot run is run for one example after the other.
    """
    plain, last = replace(plan, own_kernels=False), _one_by_one(whole_model(model))
    forms = [plan]
    for form in (plain, *([_one_by_one(plain)] if plan.units else []), last):
        forms += [form, replace(form, twice=False)]
    for form in forms[:-1]:
        try:
            return form, *disagreements(model, form, probe, expected)
        except Exception as error:  # the next form; the last one says what is wrong
            pass_on(error)
    return forms[-1], *disagreements(model, forms[-1], probe, expected)


def _one_by_one(plan: Plan) -> Plan:
    units = {name: replace(unit, mapped=False) for name, unit in plan.units.items()}
    return replace(plan, units=units, own_kernels=False)


def _wider(name: str, units: set[str]) -> str:
    """The module that owns the parameter, or the one around the unit that already holds it."""
    owner = name.rpartition(".")[0]
    holder = next((u for u in units if u == owner or owner.startswith(u + ".")), None)
    return owner if holder is None else holder.rpartition(".")[0]


def _coverage(model: nn.Module, plan: Plan, used: set[str]) -> Coverage:
    ways = {name: way for name, way in plan.ways().items() if name in used}
    parameters = trainable(model)
    sizes = {"rule": 0, "fallback": 0, "unused": 0}
    for name, parameter in parameters.items():
        way = ways.setdefault(name, "unused")
        sizes[way if way in sizes else "fallback"] += parameter.numel()
    fixed = frozen(model)
    ways |= dict.fromkeys(fixed, "frozen")
    return Coverage(ways, sizes["rule"], sizes["fallback"], count(fixed.values()), sizes["unused"])
