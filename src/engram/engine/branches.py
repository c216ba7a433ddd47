"""Batches that a model runs other operations for, with the same result for each example.

Models of ``transformers`` leave out a mask that hides nothing, so that a batch without padding goes
another way than one with it. Such a batch has a plan of its own, checked like the first one, where
an example's outputs do not depend on which way its batch went and no other parameters take part.
Else the branch changes what is computed, and the batch is refused.
"""

from __future__ import annotations

import torch

from engram.core.data.batches import Batch
from engram.engine.passes import Trace, trace
from engram.engine.plan import Plan
from engram.engine.prepare import Engine, make_plan, runnable
from engram.engine.recorder import OtherOperationsError
from engram.engine.refusals import check_independent
from engram.engine.self_check import Expected
from engram.errors import EngramError

FEW = 3  # examples that a plan is checked on, where so few take the other way


def traced(engine: Engine, batch: Batch) -> Trace:
    """The forward pass over a batch by the plan that fits it."""
    try:
        return engine.trace(batch)
    except OtherOperationsError as error:
        refusal = error
    for plan in engine.others:
        try:
            return _by(engine, plan, batch)
        except OtherOperationsError:
            continue
    plan = _checked(engine, _smallest(engine, batch), refusal)
    found = _by(engine, plan, batch)
    engine.others.append(plan)
    return found


def _by(engine: Engine, plan: Plan, batch: Batch) -> Trace:
    return trace(engine.model, plan, batch.inputs, len(batch), engine.parameters)


def _smallest(engine: Engine, batch: Batch) -> Batch:
    """A part of the batch that still goes another way, as small as halving it finds."""
    while len(batch) > FEW:
        middle = len(batch) // 2
        halves = (batch.select(slice(0, middle)), batch.select(slice(middle, len(batch))))
        other = next((half for half in halves if not _runs(engine, half)), None)
        if other is None:
            return batch
        batch = other
    return batch


def _runs(engine: Engine, batch: Batch) -> bool:
    try:
        engine.trace(batch)
    except OtherOperationsError:
        return False
    return True


def _checked(engine: Engine, few: Batch, refusal: OtherOperationsError) -> Plan:
    """A plan for these examples; the refusal where they are not the same function of each."""
    model = engine.model
    more = few.select(torch.cat([torch.arange(len(few)), torch.zeros(1, dtype=torch.long)]))
    try:
        check_independent(model, few)
        plan = make_plan(model, few.inputs, more.inputs, set(engine.plan.units))
        plan, wrong, used = runnable(model, plan, few, Expected.of(model, few))
    except EngramError as error:
        raise refusal from error
    if wrong or any(engine.coverage.ways.get(name) == "unused" for name in used):
        raise refusal
    return plan
