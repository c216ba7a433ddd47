"""The verdict on a result, from the signals that it carries: what :attr:`Result.verdict` is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engram.trust.thresholds import (
    CHECK_SIZE,
    CLOSED,
    COMPUTE,
    CONVERGENCE,
    LEVERAGE,
    LOST,
    LOST_CLOSED,
    NO_RICHER,
    NOT_TOLD,
    NOTHING,
    OWN_RULES,
    PRIOR,
    RICHER,
    SIZES_ONLY,
    STOPPED,
)
from engram.trust.verdict import CAUTION, LEVELS, UNRELIABLE, Reason, Rule, Verdict

#: Columns of a result in which every number has to be finite.
FINITE = ("outputs", "deviation", "prediction_deviation", "score", "loss", "loo_loss")


class Figures(Protocol):
    """Diagnostics that speak for or against a result; NaN where one is not known."""

    @property
    def computed(self) -> bool: ...
    @property
    def relative_gradient(self) -> float: ...
    @property
    def fitting_gradient(self) -> float: ...
    @property
    def share_inconsistent(self) -> float: ...
    @property
    def effective_parameters(self) -> float: ...
    @property
    def effective_parameters_error(self) -> float: ...
    @property
    def flagged_share(self) -> float: ...
    @property
    def parameters_covered(self) -> float: ...
    @property
    def step_error(self) -> float: ...
    @property
    def leverages_lost(self) -> int: ...


class Foundation(Protocol):
    """The part of :class:`engram.sensitivity.basis.Basis` that a verdict needs."""

    @property
    def whole_matrix(self) -> bool: ...
    @property
    def prior_fitted(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...


class Judged(Protocol):
    """What a verdict needs of a result, besides the columns named in ``FINITE``."""

    @property
    def num_data(self) -> int: ...
    @property
    def leverage(self) -> Tensor: ...
    @property
    def flagged(self) -> Tensor: ...
    @property
    def coverage(self) -> Mapping[str, str]: ...
    @property
    def diagnostics(self) -> Figures: ...
    @property
    def basis(self) -> Foundation: ...


def not_finite(result: Judged) -> Tensor:
    """Where a number of an example is NaN or infinite, [N].

    A leverage that is NaN was not computed, or is counted in the diagnostics.
    """
    lost = result.leverage.isinf()
    for name in FINITE:
        lost = lost | ~torch.isfinite(getattr(result, name).reshape(result.num_data, -1)).all(1)
    return lost


def lost_examples(result: Judged) -> list[Reason]:
    """The reason for NaN or infinity in some examples: means over all examples are then useless."""
    count = max(int(not_finite(result).sum()), result.diagnostics.leverages_lost)
    if count == 0:
        return []
    text = f"{count:,} of {result.num_data:,} examples have numbers that are NaN or infinite"
    remedy = LOST if _linearised(result) else LOST_CLOSED
    return [Reason("not_finite", LEVELS[UNRELIABLE], count / result.num_data, 0.0, text, remedy)]


def not_judged(result: Judged) -> list[Reason]:
    """The reason for a result without diagnostics: no signal is no sign that all is well."""
    if result.diagnostics.computed:
        return []
    return [Reason("diagnostics", LEVELS[CAUTION], 0.0, 0.0, NOTHING, COMPUTE)]


def was_stopped(result: Judged) -> list[Reason]:
    """The reason for care where training was stopped: how right that is differs from net to net."""
    if not result.basis.stopped:
        return []
    return [Reason("stopped", LEVELS[CAUTION], 1.0, 0.0, STOPPED, CHECK_SIZE, SIZES_ONLY)]


def _linearised(result: Judged) -> bool:
    """Whether a net was linearised; models in closed form may have any leverage."""
    return any(way in ("rule", "copies", "unit") for way in result.coverage.values())


def signals(result: Judged) -> dict[str, float]:
    """The signals of the rules by name; NaN where a result does not know."""
    found = result.diagnostics
    leverage = found.effective_parameters / result.num_data
    if math.isnan(found.effective_parameters_error):  # one example, which says nothing about all
        leverage = math.nan
    relative = found.relative_gradient
    if math.isnan(relative) and found.computed:  # then the gradient is no number
        relative = math.inf
    convergence = relative
    if math.isfinite(relative) and not math.isnan(found.fitting_gradient):
        convergence = min(relative, found.fitting_gradient)
    return {
        "convergence": convergence,
        "prior_mismatch": 0.0 if math.isinf(relative) else relative - convergence,
        "share_inconsistent": found.share_inconsistent,
        "mean_leverage": leverage if _linearised(result) else math.nan,
        "flagged_share": found.flagged_share,
        "parameters_fixed": 1 - found.parameters_covered,
        "step_error": found.step_error,
    }


def rules_of(result: Judged) -> tuple[Rule, ...]:
    """The rules, with remedies that the result's structure leaves open."""
    rules: tuple[Rule, ...] = OWN_RULES
    if result.basis.stopped:  # no minimum is assumed, and the prior is the training's own
        rules = tuple(rule for rule in rules if rule not in (CONVERGENCE, PRIOR))
    if result.basis.prior_fitted:
        rules = tuple(NOT_TOLD if rule is CONVERGENCE else rule for rule in rules)
    if not result.basis.whole_matrix:
        return rules
    remedy = NO_RICHER if _linearised(result) else CLOSED
    return tuple(replace(r, remedy=remedy) if r in RICHER else r for r in rules)


def own_levels(result: Judged) -> Tensor:
    """Levels of single examples by their own leverage, guard flag and finiteness, [N]."""
    levels = LEVERAGE.levels(result.leverage)
    if not _linearised(result):
        levels = torch.zeros_like(levels)
    bad = result.flagged | not_finite(result)
    return torch.where(bad, torch.full_like(levels, UNRELIABLE), levels)


def judge(result: Judged) -> Verdict:
    """The verdict from what the result carries."""
    return verdict_by(rules_of(result), signals(result), own_levels(result), result)


def verdict_by(
    rules: Iterable[Rule], known: Mapping[str, float], levels: Tensor, result: Judged
) -> Verdict:
    """The verdict from rules and signals, and from what the result has lost or not computed.

    Args:
        rules: for the run.
        known: the signals by name.
        levels: of the examples, by themselves, [N].
        result: that is judged.
    """
    found = [rule.reason(known[rule.signal]) for rule in rules]
    reasons = [*(reason for reason in found if reason), *was_stopped(result), *not_judged(result)]
    return Verdict.from_reasons(reasons, levels, lost_examples(result))
