"""The plan of a model: probed, with units as small as can be and as wide as must be."""

from __future__ import annotations

import torch
from torch import nn

from engram.core.data.batches import Inputs, call
from engram.engine.paths import Paths
from engram.engine.plan import Plan
from engram.engine.probe import Probe, ShapeLog
from engram.engine.units import Unit, replaced


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
            return Plan(tuple(probe.touches), units)
        # a unit that still leaves something open, because nobody calls it, gives no more than this
        open_still = {unit for unit in units for name in wanted if lies_in(name, unit)}
        wider = around(mixed | open_still)
        if not wanted and not wider:  # the number of examples decides which operations there are
            break
        unit_names = outermost((unit_names - mixed) | wanted | wider)
    return whole(model)


def rounds(model: nn.Module) -> int:
    """How often units can widen until nothing is left to widen: twice for every level."""
    return 2 * max(name.count(".") + 1 for name, _ in model.named_modules()) + 2


def whole(model: nn.Module) -> Plan:
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
