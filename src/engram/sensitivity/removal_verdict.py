"""The verdict on leaving a group out, from what was measured along its step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engram.sensitivity.group_steps import Matrix
from engram.sensitivity.step_signals import StepSignals
from engram.trust.aspects import ASPECTS, EXACT, GROUP, SIZE
from engram.trust.remedies import replay
from engram.trust.thresholds import (
    CHANGE_FEWER,
    CHANGED_REMEDIES,
    CLOSED_RULES,
    DRIFT,
    FACTORS_OVERLOOK,
    HELD,
    LET_GO,
    LOST_EFFECT,
    NO_SIGNAL,
    ONE_STEP,
    OTHER_RULE,
    OVERLOOKED,
    RAISE_PRIOR,
    REPLAY_RISE,
    RISE,
    STOPPED_OVERLOOKED,
    STOPPED_RISE,
    STOPPED_WORSE,
    WORSE,
)
from engram.trust.verdict import CAUTION, LEVELS, UNRELIABLE, Reason, Rule, Verdict

# Leverage speaks by the matrix: one that has the group in it, or has seen too few directions to
# have it taken out, makes a step that is too short; factors are too unsure. Exact matrices of the
# remaining data take any leverage below 1, and theirs never is above.
LEVERAGE_RULES: Mapping[Matrix, Rule] = {
    Matrix.ALL: OVERLOOKED,
    Matrix.STOPPED: STOPPED_OVERLOOKED,
    Matrix.FACTORS: FACTORS_OVERLOOK,
}


@dataclass(frozen=True)
class Grounds:
    """What a verdict on a removal stands on.

    Args:
        matrix: of the step; None where there was none.
        signals: along it; None where none were measured.
        stopped: whether the training was recorded, and is what the removal is about.
        exact: whether it is no estimate: a fit again, or a quadratic objective.
        held: whether a guard held.
        finite: whether all its numbers are.
        seconds: that the recorded training took; None where that is not known.
        changed: whether examples are changed or added, not left out.
    """

    matrix: Matrix | None
    signals: StepSignals | None
    stopped: bool
    exact: bool
    held: bool
    finite: bool
    seconds: float | None = None
    changed: bool = False


def removal_verdict(grounds: Grounds) -> Verdict:
    """The worst of what speaks against a removal."""
    reasons = []
    if not grounds.finite:
        reasons.append(_said("not_finite", UNRELIABLE, LOST_EFFECT, RAISE_PRIOR))
    if grounds.held:
        reasons.append(_said("guard", UNRELIABLE, HELD, LET_GO))
    if grounds.signals is None and not grounds.exact:
        reasons.append(_said("signals", CAUTION, NO_SIGNAL, OTHER_RULE))
    if grounds.stopped and grounds.matrix is not None:
        reasons.append(_said("one_step", CAUTION, ONE_STEP, replay(grounds.seconds), (SIZE,)))
    if grounds.signals is not None:
        known = _values(grounds.signals)
        found = [rule.reason(known[rule.signal]) for rule in _rules(grounds)]
        reasons += [reason for reason in found if reason]
    if grounds.changed:
        remedies = [CHANGED_REMEDIES.get(reason.signal, CHANGE_FEWER) for reason in reasons]
        reasons = [replace(r, remedy=said) for r, said in zip(reasons, remedies, strict=True)]
    verdict = Verdict.from_reasons(reasons, torch.zeros(0, dtype=torch.int8))
    return replace(verdict, subject=EXACT if grounds.exact else GROUP)


def _rules(grounds: Grounds) -> Sequence[Rule]:
    if grounds.matrix is None:  # a replay
        return [REPLAY_RISE]
    if grounds.signals is not None and grounds.signals.second_step is not None:
        return CLOSED_RULES
    leverage = LEVERAGE_RULES.get(grounds.matrix)
    rules = [STOPPED_RISE, STOPPED_WORSE] if grounds.stopped else [RISE, WORSE, DRIFT]
    return rules if leverage is None else [leverage, *rules]


def _values(signals: StepSignals) -> dict[str, float]:
    """By the names of the rules, each worse the larger it is; what is no number is the worst."""

    def known(value: float | None) -> float:
        if value is None:
            return math.nan
        return math.inf if math.isnan(value) else value

    agreement = None if signals.agreement is None else -signals.agreement
    return {
        "remaining_rise": known(signals.remaining_change),
        "group_leverage": known(signals.leverage),
        "disagreement": known(agreement),
        "drift": known(signals.drift),
        "second_step": known(signals.second_step),
    }


def _said(
    signal: str, level: int, text: str, remedy: str, about: tuple[str, ...] = ASPECTS
) -> Reason:
    return Reason(signal, LEVELS[level], 1.0, 0.0, text, remedy, about)
