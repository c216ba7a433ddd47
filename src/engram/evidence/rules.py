"""The rules of an assessment: what was measured, its thresholds, and what speaks against examples.

The thresholds come from the study in docs/results/trust.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram.evidence.signals import Signals
from engram.sensitivity.result import Result
from engram.trust import thresholds as rules
from engram.trust.verdict import UNRELIABLE, Rule, Verdict

RANKS = Rule(
    "rank_disagreement",
    0.06,
    0.1,
    "steps of the exact Hessian rank the examples differently",
    'Use structure="full" or "kronecker", and train to a minimum.',
)
SIZES = Rule(
    "size_disagreement",
    0.1,
    0.2,
    "steps of the exact Hessian give scores of other relative size",
    'Use curvature="hessian" where that is positive definite, else structure="full" with '
    'estimator="corrected".',
)
LINEARISATION = Rule(
    "linearisation",
    0.15,
    0.2,
    "the model is far from its tangent where the posterior's steps lead",
    "Regularise more, or use a posterior that is surer.",
)
INDEFINITE = Rule(
    "indefinite",
    0.0,
    math.inf,
    "the Hessian has negative curvature: a saddle, or not yet a minimum",
    "Train on with noise or another seed, or regularise more.",
)
RULES = (RANKS, SIZES, LINEARISATION, INDEFINITE)
FACTOR = Rule(
    "factor",
    2.0,
    5.0,
    "the exact Hessian gives the example another score",
    "Train without it.",
)


def measured(signals: Signals) -> dict[str, float]:
    """The signals of the rules by name, each worse the larger it is.

    Correlations are not known where scores do not differ; everything else that is no number came
    from numbers that are none, and is as bad as can be.
    """
    known = bool(_comparable(signals).all())
    return {
        "rank_disagreement": 1 - signals.spearman if known else math.inf,
        "size_disagreement": 1 - signals.pearson if known else math.inf,
        "linearisation": _worst_if_nan(signals.linearisation),
        "indefinite": _worst_if_nan(max(-signals.smallest_curvature, 0.0)),
    }


def _worst_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _comparable(signals: Signals) -> Tensor:
    """Where both scores are numbers, [n]."""
    return torch.isfinite(signals.score) & torch.isfinite(signals.second_score)


def own_levels(result: Result, signals: Signals) -> Tensor:
    """The result's own levels; for the sample also how many times the two scores differ by."""
    levels = rules.own_levels(result)
    tiny = torch.finfo(signals.score.dtype).tiny
    ratio = signals.score.clamp(min=tiny) / signals.second_score.to(signals.score).clamp(min=tiny)
    factor = FACTOR.levels(torch.maximum(ratio, 1 / ratio))
    factor = torch.where(_comparable(signals), factor, torch.full_like(factor, UNRELIABLE))
    levels[signals.positions] = torch.maximum(levels[signals.positions], factor)
    return levels


def judge(result: Result, signals: Signals) -> Verdict:
    """The verdict from what the result carries and what was measured."""
    known = rules.signals(result) | measured(signals)
    return Verdict.of(
        (*rules.rules_of(result), *RULES),
        known,
        own_levels(result, signals),
        rules.lost_examples(result),
    )
