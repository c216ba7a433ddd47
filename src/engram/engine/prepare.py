"""Everything before the first batch: a plan that was checked, on a model left as it was."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from engram.core.data.batches import Batch, Batches
from engram.core.errors import EngineError
from engram.core.parameters import check_finite_weights, count, frozen, trainable
from engram.core.state.model import device_of
from engram.engine.own_hessian import has_true_hessian
from engram.engine.passes import Trace, trace
from engram.engine.plan import Plan
from engram.engine.planning import make_plan, outermost, rounds, whole
from engram.engine.refusals import check_independent, check_kinds, named_failures, pass_on
from engram.engine.self_check import Expected, disagreements, no_second_derivative


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


BatchNorm = nn.modules.batchnorm._BatchNorm


def training_layers(model: nn.Module) -> list[str]:
    """Kinds of layers in train mode that behave otherwise in eval mode."""
    kinds = (BatchNorm, nn.modules.dropout._DropoutNd)
    found = (m for m in model.modules() if isinstance(m, kinds) and m.training)
    return sorted({type(module).__name__ for module in found})


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


def _prepare(model: nn.Module, batches: Batches) -> Engine:
    parameters = trainable(model)
    check_kinds(model)
    check_finite_weights(model)
    first = batches.take(torch.arange(min(3, batches.num_data)))
    positions = torch.arange(3) % len(first)
    probe = first.select(positions).to(device_of(model))
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
        plan = _planned(model, probe, units)
        checked, wrong, used = _runnable(model, plan, probe, expected)
        if not wrong:
            return checked, used
        if set(plan.units) == {""}:
            break
        units = outermost(set(plan.units) | {_wider(name, set(plan.units)) for name in wrong})
    checked, wrong, used = _runnable(model, _one_by_one(whole(model)), probe, expected)
    if wrong:
        raise EngineError(
            "per-example gradients that agree with autograd",
            f"other gradients of {wrong[0]!r}, even with each example by itself",
            "take away hooks that change gradients, and functions whose backward is none of theirs",
        )
    return checked, used


def _planned(model: nn.Module, probe: Batch, units: set[str]) -> Plan:
    try:
        return make_plan(model, probe.select(slice(0, 2)).inputs, probe.inputs, units)
    except Exception as error:  # the model itself runs: what failed is seen, or not, as a whole
        pass_on(error)
        return whole(model)


def _runnable(
    model: nn.Module, plan: Plan, probe: Batch, expected: Expected
) -> tuple[Plan, list[str], set[str]]:
    """The plan in the first form that runs, with what :func:`disagreements` says of it.

    A checkpoint runs the model again in its backward pass and wants the same operations, so our
    own kernels are left out; what cannot be differentiated twice takes a backward pass for every
    output; what vmap cannot run is run for one example after the other.
    """
    plain, last = replace(plan, own_kernels=False), _one_by_one(whole(model))
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
