"""The rules of a result's own verdict: signals that every result carries, and their thresholds.

The thresholds come from the study in docs/results/trust.md, except those of the guard and of what
is taken as fixed, which the study does not vary: these only ask for caution.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.trust.verdict import LEVELS, UNRELIABLE, Reason, Rule, Verdict

if TYPE_CHECKING:
    from engram.sensitivity.result import Result

CONVERGENCE = Rule(
    "convergence",
    0.03,
    0.1,
    "the model is not at a minimum of its objective",
    "Train until the gradient vanishes, with the regulariser in the objective.",
)
PRIOR = Rule(
    "prior_mismatch",
    0.05,
    math.inf,
    "prior_precision is not the regulariser that the model was trained with",
    "Pass the delta of the training, N times the weight decay of the mean loss; "
    "diagnostics.fitting_prior is what the weights fit best.",
)
CONSISTENCY = Rule(
    "share_inconsistent",
    0.16,
    0.25,
    "the posterior is surer of many examples than all data together allow",
    "Use a richer structure (full before kronecker before diagonal), or regularise more.",
)
CAPACITY = Rule(
    "mean_leverage",
    0.65,
    0.82,
    "nearly as many effective parameters as examples, or more",
    "Use a richer structure (full before kronecker before diagonal), or regularise more.",
)
GUARD = Rule(
    "flagged_share",
    0.05,
    math.inf,
    "the estimator was held by its guard",
    'Use estimator="linear", or structure="full".',
)
COVERAGE = Rule(
    "parameters_fixed",
    0.05,
    math.inf,
    "some trainable parameters are taken as fixed by the posterior",
    "Use a posterior of all parameters if the training moved all of them.",
)
STEP = Rule(
    "step_error",
    0.02,
    0.1,
    "one Newton step, or less, is not enough for some examples",
    'Use estimator="exact", which fits again without them.',
)
RULES = (CONVERGENCE, PRIOR, CONSISTENCY, CAPACITY, GUARD, COVERAGE, STEP)
RICHER = (CONSISTENCY, CAPACITY, GUARD)  # their remedies name a richer structure
NO_RICHER = (
    "The structure is the richest there is here: regularise more, use fewer parameters, or obtain "
    'the examples that matter by engram.refine with method="retrain".'
)
CLOSED = (
    "The model is in closed form, and its precision the whole one: use a larger penalty, noise or "
    "prior precision, or fit again without the examples that matter."
)
LEVERAGE = Rule("leverage", 0.5, 1.0, "the example holds itself in place", "Train without it.")


LOST = (
    "Raise prior_precision, compute in double precision, or leave these examples out: their rows, "
    "and means over all rows, mean nothing."
)
LOST_CLOSED = (
    "Without such an example the others determine no coefficients, are separated, or leave its "
    "mean outside of the support: use penalty > 0, drop columns that it alone determines, or leave "
    "it out. Means over all rows mean nothing."
)
FINITE = ("outputs", "deviation", "prediction_deviation", "score", "loss", "loo_loss")


def not_finite(result: Result) -> Tensor:
    """Where a number of an example is NaN or infinite, [N].

    A leverage that is NaN was not computed, or is counted in the diagnostics.
    """
    lost = result.leverage.isinf()
    for name in FINITE:
        lost = lost | ~torch.isfinite(getattr(result, name).reshape(result.num_data, -1)).all(1)
    return lost


def lost_examples(result: Result) -> list[Reason]:
    """That some numbers are no numbers: the means over all examples are none either."""
    count = max(int(not_finite(result).sum()), result.diagnostics.leverages_lost)
    if count == 0:
        return []
    text = f"{count:,} of {result.num_data:,} examples have numbers that are NaN or infinite"
    remedy = LOST if _linearised(result) else LOST_CLOSED
    return [Reason("not_finite", LEVELS[UNRELIABLE], count / result.num_data, 0.0, text, remedy)]


def _linearised(result: Result) -> bool:
    """Whether a net was linearised; models in closed form may have any leverage."""
    return any(way in ("rule", "copies", "unit") for way in result.coverage.values())


def signals(result: Result) -> dict[str, float]:
    """The signals of the rules by name; NaN where a result does not know."""
    found = result.diagnostics
    leverage = found.effective_parameters / result.num_data
    relative = found.relative_gradient
    if math.isnan(relative):  # it is always computed: the gradient is no number
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


def rules_of(result: Result) -> tuple[Rule, ...]:
    """The rules, with remedies that the result's structure leaves open."""
    if not result.basis.whole_matrix:
        return RULES
    remedy = NO_RICHER if _linearised(result) else CLOSED
    return tuple(replace(r, remedy=remedy) if r in RICHER else r for r in RULES)


def own_levels(result: Result) -> Tensor:
    """What speaks against single examples, whatever the run: leverage, guard, no numbers."""
    levels = LEVERAGE.levels(result.leverage)
    if not _linearised(result):
        levels = torch.zeros_like(levels)
    bad = result.flagged | not_finite(result)
    return torch.where(bad, torch.full_like(levels, UNRELIABLE), levels)


def judge(result: Result) -> Verdict:
    """The verdict from what the result carries."""
    return Verdict.of(rules_of(result), signals(result), own_levels(result), lost_examples(result))
