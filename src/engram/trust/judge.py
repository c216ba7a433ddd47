"""The verdict on a result, from the signals that it carries: what :attr:`Result.verdict` is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engram.trust.aspects import Expected
from engram.trust.expectation import (
    AGREEMENT,
    ALONG,
    ALONG_UNNAMED,
    AT_THE_END,
    AT_THE_END_UNNAMED,
    GRADIENT,
    KEPT,
    NOT_RECORDED,
    ONE,
    RATIO,
    TRAIN,
    VISITS,
    Predictor,
)
from engram.trust.remedies import go_along, truth
from engram.trust.thresholds import (
    CLOSED,
    COMPUTE,
    CONVERGENCE,
    END_ALONE,
    GUARD,
    LEVERAGE,
    LOST,
    LOST_CLOSED,
    NO_RICHER,
    NOT_TOLD,
    NOTHING,
    OR_RECORD,
    OWN_RULES,
    PRIOR,
    RANKING_AT_END,
    RICHER,
    SIZES_ONLY,
    STOPPED,
    WITH_TIME,
    along_rules,
    end_rules,
)
from engram.trust.verdict import CAUTION, LEVELS, UNRELIABLE, Reason, Rule, Verdict

STUDIED = ("full", "kronecker")  # structures that the study of stopped nets is about
NOTICEABLE = 0.1  # nats: a leave-one-out loss that may well be larger than it was estimated
#: Columns of a result in which every number has to be finite.
FINITE = ("outputs", "deviation", "prediction_deviation", "score", "loss", "loo_loss")


class TrainingFigures(Protocol):
    """What a recorded training says of its estimate; NaN where it does not."""

    @property
    def readout_agreement(self) -> float: ...
    @property
    def end_agreement(self) -> float: ...
    @property
    def visit_agreement(self) -> float: ...


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
    @property
    def course(self) -> TrainingFigures: ...


class Foundation(Protocol):
    """The part of :class:`engram.sensitivity.basis.Basis` that a verdict needs."""

    @property
    def structure(self) -> str | None: ...
    @property
    def whole_matrix(self) -> bool: ...
    @property
    def prior_fitted(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def along(self) -> bool: ...
    @property
    def training_seconds(self) -> float | None: ...
    @property
    def walkable(self) -> bool: ...


class Judged(Protocol):
    """What a verdict needs of a result, besides the columns named in ``FINITE``."""

    @property
    def num_data(self) -> int: ...
    @property
    def train_nll(self) -> float: ...
    @property
    def loo_nll(self) -> float: ...
    @property
    def classifies(self) -> bool: ...
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


def figures_of(result: Judged) -> dict[str, float]:
    """The figures that the study's predictors take; NaN where a result does not know one."""
    train, left_out = result.train_nll, result.loo_nll
    positive = 0 < train < left_out < math.inf  # so are those of classifiers
    return {
        ONE: 1.0,
        TRAIN: math.log(train) if positive else math.nan,
        RATIO: math.log(left_out / train) if positive else math.nan,
        GRADIENT: signals(result)["convergence"],
        AGREEMENT: result.diagnostics.course.readout_agreement,
        VISITS: result.diagnostics.course.visit_agreement,
        KEPT: result.diagnostics.course.end_agreement,
    }


def predictor_of(result: Judged) -> Predictor | None:
    """The study's predictor for such results; None at a minimum, where it has none to tell."""
    basis = result.basis
    if not result.classifies or basis.structure not in STUDIED:
        return None
    if not basis.stopped:
        away = CONVERGENCE.level(signals(result)["convergence"]) == UNRELIABLE
        return NOT_RECORDED if away and _linearised(result) else None
    named = _named(result)
    if not basis.along:
        return AT_THE_END if named else AT_THE_END_UNNAMED
    if basis.whole_matrix:  # walks with full matrices were not studied
        return None
    return ALONG if named else ALONG_UNNAMED


def _named(result: Judged) -> bool:
    """Whether the steps of the training named their examples, and what they said is known."""
    return not math.isnan(result.diagnostics.course.visit_agreement)


def expected_of(result: Judged) -> Expected:
    """The numbers to expect of a result of a net that was stopped; NaN where none are known."""
    predictor = predictor_of(result)
    if predictor is None or not result.diagnostics.computed:
        return Expected()
    return predictor.expected(figures_of(result))


def was_stopped(result: Judged) -> list[Reason]:
    """The reason for care where training was stopped, and nothing tells how right sizes are."""
    if not result.basis.stopped:
        return []
    if not result.basis.along and result.diagnostics.computed:
        again = go_along(result.basis.walkable, result.basis.training_seconds)
        return [Reason("end_alone", LEVELS[CAUTION], 1.0, 0.0, END_ALONE, again, SIZES_ONLY)]
    if not math.isnan(expected_of(result).size):
        return []
    look = truth(result.basis.training_seconds)
    return [Reason("stopped", LEVELS[CAUTION], 1.0, 0.0, STOPPED, look, SIZES_ONLY)]


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
    at_minimum = _linearised(result) and CONVERGENCE.level(convergence) < UNRELIABLE
    return {
        "convergence": convergence,
        "prior_mismatch": 0.0 if math.isinf(relative) else relative - convergence,
        "share_inconsistent": found.share_inconsistent,
        "mean_leverage": leverage if _linearised(result) else math.nan,
        "flagged_share": found.flagged_share,
        "parameters_fixed": 1 - found.parameters_covered,
        "by_heart": _by_heart(result) if at_minimum else math.nan,
        "step_error": found.step_error,
    }


def _by_heart(result: Judged) -> float:
    """The leave-one-out loss of a classifier, or 0.1 nats if that is more, over its loss."""
    train, left_out = result.train_nll, result.loo_nll
    known = result.classifies and train > 0
    return max(left_out, NOTICEABLE) / train if known else math.nan


def foreseen(expected: Expected) -> dict[str, float]:
    """How far what is to be expected is from right, by the names of the rules."""
    return {
        "expected_ranking": 1 - expected.ranking,
        "expected_size": _factor(expected.size),
        "expected_mean": _factor(expected.mean),
    }


def _factor(ratio: float) -> float:
    """How many times too large or too small."""
    return ratio if math.isnan(ratio) else max(ratio, 1 / max(ratio, 1e-300))


def rules_of(result: Judged) -> tuple[Rule, ...]:
    """The rules, with remedies that the result's structure leaves open."""
    rules: tuple[Rule, ...]
    basis, foretold = result.basis, not math.isnan(expected_of(result).size)
    if basis.stopped and foretold:
        # what the posterior of a recorded training takes as fixed, training does not move
        if basis.along:
            return (*along_rules(basis.training_seconds), GUARD)
        again = go_along(basis.walkable, basis.training_seconds)
        return (*end_rules(_named(result), again), GUARD)
    rules = OWN_RULES
    if basis.prior_fitted:
        rules = tuple(NOT_TOLD if rule is CONVERGENCE else rule for rule in rules)
    if basis.stopped:  # no minimum is assumed, and the prior is the training's own
        rules = tuple(rule for rule in rules if rule not in (CONVERGENCE, PRIOR))
    if basis.whole_matrix:
        remedy = NO_RICHER if _linearised(result) else CLOSED
        # many effective parameters of a whole matrix do not spoil the ranking
        rules = tuple(
            replace(rule, remedy=remedy, about=SIZES_ONLY) if rule in RICHER else rule
            for rule in rules
        )
    if foretold:  # not at a minimum, and not recorded: the ranking may be right for all that
        own = (replace(rule, about=SIZES_ONLY, remedy=_recorded(rule)) for rule in rules)
        return (RANKING_AT_END, *own)
    return rules


def _recorded(rule: Rule) -> str:
    """The remedy of a rule for a net that was stopped: to say so, where others cannot be followed.

    It is trained no further, and what looks like too few curvatures is the time that is missing.
    """
    if rule.signal == CONVERGENCE.signal and rule is not NOT_TOLD:
        return OR_RECORD
    return WITH_TIME if rule.signal in {other.signal for other in RICHER} else rule.remedy


def own_levels(result: Judged) -> Tensor:
    """Levels of single examples by their own leverage, guard flag and finiteness, [N]."""
    levels = LEVERAGE.levels(result.leverage)
    one_step = result.diagnostics.step_error > 0  # of a model in closed form; else it is exact
    if not (_linearised(result) or one_step):
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
    expected = expected_of(result)
    known = {**foreseen(expected), **known}
    found = [rule.reason(known[rule.signal]) for rule in rules]
    reasons = [*(reason for reason in found if reason), *was_stopped(result), *not_judged(result)]
    return Verdict.from_reasons(reasons, levels, lost_examples(result), expected)
