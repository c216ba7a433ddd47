"""Every threshold of a verdict, with what passing it means and what to do about it.

Signals are worse the larger they are: above ``caution`` a result calls for caution, above
``unreliable`` it is not to be believed. The numbers come from the study in docs/results/trust.md:
290 runs, each held against the true scores of 40 examples from retraining. The goal was to flag
90 % of the runs whose correlation with the truth is below 0.7, and at most 10 % of those above
0.95. Those of the guard, of what is taken as fixed and of the step the study does not vary.

What a result's own signals are is in :mod:`engram.trust.judge`, what an assessment measures in
:mod:`engram.evidence.signals`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engram.trust.aspects import MEAN, RANKING, SIZE
from engram.trust.remedies import REPLAYED, certify, finer, record, truth
from engram.trust.verdict import Rule

SIZES_ONLY = (SIZE, MEAN)  # the order may be right for all that

# Signals that every result carries.
CONVERGENCE = Rule(
    "convergence",
    caution=0.03,
    unreliable=0.1,
    text="the model is not at a minimum of its objective",
    remedy="Train until the gradient vanishes, with the regulariser in the objective.",
)
NOT_TOLD = replace(
    CONVERGENCE,
    text="the model is not at a minimum, and nothing was said of its training: prior_precision is "
    "the one that its weights fit best",
    remedy="Pass training=: sizes of such nets in the study were then within 2 times the truth for "
    "15 of 16, not for 5. Or pass prior_precision=, N times the weight decay of the mean loss.",
)
PRIOR = Rule(
    "prior_mismatch",
    caution=0.05,
    unreliable=math.inf,
    text="prior_precision is not the regulariser that the model was trained with",
    remedy="Pass the delta of the training, N times the weight decay of the mean loss; "
    "diagnostics.fitting_prior is what the weights fit best.",
    about=SIZES_ONLY,
)
CONSISTENCY = Rule(
    "share_inconsistent",
    caution=0.16,
    unreliable=0.25,
    text="the posterior is surer of many examples than all data together allow",
    remedy="Use a richer structure (full before kronecker before diagonal), or regularise more.",
    about=SIZES_ONLY,
)
CAPACITY = Rule(
    "mean_leverage",
    caution=0.65,
    unreliable=0.82,
    text="nearly as many effective parameters as examples, or more",
    remedy="Use a richer structure (full before kronecker before diagonal), or regularise more.",
)
GUARD = Rule(
    "flagged_share",
    caution=0.05,
    unreliable=math.inf,
    text="the estimator was held by its guard",
    remedy='Use estimator="linear", or structure="full".',
    about=SIZES_ONLY,
)
COVERAGE = Rule(
    "parameters_fixed",
    caution=0.05,
    unreliable=math.inf,
    text="some trainable parameters are taken as fixed by the posterior",
    remedy="Use a posterior of all parameters if the training moved all of them.",
)
# Set on docs/results/glm_exact.md: of 37 estimates off by more than 2 times one is below caution,
# of 154 good ones 11 are above it
STEP = Rule(
    "step_error",
    caution=0.15,
    unreliable=0.35,  # from there on increases of a third of the truth, and less
    text="one Newton step, or less, is not enough for some examples",
    remedy='Use estimator="exact", which fits again without them.',
    about=SIZES_ONLY,
)
# At a minimum with a weak regulariser one step leads too far for the matrix that it was taken with:
# with Kronecker factors sizes came out at 0.06 to 0.7 of the truth there, with full ones at 0.8 to
# 2.5 (softmax regressions of 20 to 300 digits, delta 0.01, all refitted).
BY_HEART = Rule(
    "by_heart",
    caution=8.0,
    unreliable=math.inf,
    text="the model knows its examples nearly by heart, and one step sees little of what it would "
    "say without one",
    remedy="Regularise more, or obtain the examples that matter by engram.refine.",
    about=SIZES_ONLY,
)
OWN_RULES = (CONVERGENCE, PRIOR, CONSISTENCY, CAPACITY, GUARD, COVERAGE, BY_HEART, STEP)
RICHER = (CONSISTENCY, CAPACITY, GUARD)  # their remedies name a richer structure

# What to expect of nets that were stopped (docs/results/trust-practical.md).
RANKING_ALONG = Rule(
    "expected_ranking",
    caution=0.1,
    unreliable=0.25,
    text="how the training itself ranked the examples is as in nets whose ranking was off",
    remedy=truth(None),
    about=(RANKING,),
)
SIZE_ALONG = Rule(
    "expected_size",
    caution=1.25,
    unreliable=2.5,
    text="how the training itself ranked the examples is as in nets whose sizes were off",
    remedy=certify(None),
    about=(SIZE,),
)
MEAN_ALONG = replace(
    SIZE_ALONG,
    signal="expected_mean",
    caution=1.25,
    unreliable=2.0,
    text="how the training itself ranked the examples is as in nets whose mean was off",
    about=(MEAN,),
)


def along_rules(seconds: float | None = None) -> tuple[Rule, ...]:
    """The rules of an estimate along a recorded training.

    Args:
        seconds: that the training took, by which the remedies are told.
    """
    ranks = replace(RANKING_ALONG, remedy=truth(seconds))
    size = replace(SIZE_ALONG, remedy=f"{finer()} {certify(seconds)}")
    return (ranks, size, replace(MEAN_ALONG, remedy=certify(seconds)))


ALONG_RULES = along_rules()
END_ALONE = (
    "the end of a training alone: sizes have been seen at 0.02 to 40 times the truth, and no "
    "figure of the end tells those that are right from such as are off by 2 times"
)
FAR_OFF = "losses and gradient are those of nets whose estimates from the end were off"
RECORD = record(None)
OR_RECORD = f"Train to a minimum. Where training is stopped before: r{RECORD[1:]}"
WITH_TIME = (
    "Pass training=: its time holds the weights where training left them, whatever the structure."
)
RANKING_AT_END = replace(RANKING_ALONG, text=FAR_OFF, remedy=RECORD)


def end_rules(named: bool, remedy: str = RECORD) -> tuple[Rule, ...]:
    """The rules of an estimate from the end of a training alone.

    Args:
        named: whether the training's steps named their examples: what they said tells sizes that
            are far off. None is ever good, by END_ALONE.
        remedy: how to go along the training.
    """
    rules = (RANKING_AT_END, *(SIZE_ALONG, MEAN_ALONG) * named)
    return tuple(replace(rule, text=FAR_OFF, remedy=remedy) for rule in rules)


# Signals that an assessment measures, on a sample of the examples.
RANKS = Rule(
    "rank_disagreement",
    caution=0.06,
    unreliable=0.1,
    text="steps of the exact Hessian rank the examples differently",
    remedy='Use structure="full" or "kronecker", and train to a minimum.',
    about=(RANKING,),
)
SIZES = Rule(
    "size_disagreement",
    caution=0.1,
    unreliable=0.2,
    text="steps of the exact Hessian give scores of other relative size",
    remedy='Use curvature="hessian" where that is positive definite, else structure="full" with '
    'estimator="corrected".',
    about=SIZES_ONLY,
)
LINEARISATION = Rule(
    "linearisation",
    caution=0.15,
    unreliable=0.2,
    text="the model is far from its tangent where the posterior's steps lead",
    remedy="Regularise more, or use a posterior that is surer.",
    about=SIZES_ONLY,
)
INDEFINITE = Rule(
    "indefinite",
    caution=0.0,
    unreliable=math.inf,
    text="the Hessian has negative curvature: a saddle, or not yet a minimum",
    remedy="Train on with noise or another seed, or regularise more.",
)
MEASURED_RULES = (RANKS, SIZES, LINEARISATION, INDEFINITE)

# Signals of a single example.
LEVERAGE = Rule(
    "leverage",
    caution=0.5,
    unreliable=1.0,
    text="the example holds itself in place",
    remedy="Train without it.",
    about=SIZES_ONLY,
)
FACTOR = Rule(
    "factor",
    caution=2.0,
    unreliable=5.0,
    text="the exact Hessian gives the example another score",
    remedy="Train without it.",
)

# Signals of leaving a group out. Set on the 144 removals of docs/results/groups.md (nets that were
# stopped, with a record), 406 at a minimum and 384 from nets that were stopped without a record,
# beside training again (docs/decisions.md).
OVERLOOKED = Rule(
    "group_leverage",
    caution=0.3,
    unreliable=0.5,  # at 0.7 sources came out at 0.06 to 0.5 of the truth
    text="the group has much of the curvature along its step, which the step leaves out",
    remedy=f'Use estimator="corrected", or walk the training again: {REPLAYED}.',
    about=SIZES_ONLY,
)
FACTORS_OVERLOOK = replace(
    OVERLOOKED,
    caution=0.5,
    unreliable=math.inf,  # at a minimum most of those are within a factor 2 for all that
    text="the factors have too little curvature along the group's step",
    remedy=f'Use structure="full", or walk the training again: {REPLAYED}.',
)
FIT_AGAIN = 'Use estimator="exact", which fits again without the group.'
CONVERGE = "Fit to convergence."
RISE = Rule(
    "remaining_rise",
    caution=0.03,  # nats per remaining example; up to 0.09 steps were within a factor 2
    unreliable=0.1,
    text="the loss of the remaining data rises, where training again would hardly raise it",
    remedy="Leave out fewer at a time, or train again without the group: engram.retrain(groups=).",
)
STOPPED_RISE = replace(
    RISE,
    caution=0.015,  # the most that training again raised it by
    unreliable=0.03,  # steps that were wrong in sign or by a factor 2 raised it by 0.035 to 300
    remedy="",  # that of ONE_STEP, which always stands beside it
)
REPLAY_RISE = replace(
    STOPPED_RISE,
    remedy="Train again without the group: engram.retrain(groups=).",
)
WORSE = Rule(
    "disagreement",
    caution=0.0,  # minus actual over predicted decrease of the remaining data's objective
    unreliable=math.inf,
    text="the objective of the remaining data gets worse along the step",
    remedy="Leave out fewer at a time, or train again without the group: engram.retrain(groups=).",
)
STOPPED_WORSE = replace(WORSE, unreliable=0.0, remedy="")
STOPPED_OVERLOOKED = replace(OVERLOOKED, remedy="")
DRIFT = Rule(
    "drift",
    caution=0.1,
    unreliable=1.0,  # then further training would move the model more than leaving the group out
    text="the model is not at a minimum of its objective along the step, and its training was not "
    "recorded",
    remedy=f"Train to a minimum, or walk the training again: {REPLAYED}.",
)
# Set on 422 groups of the tables of docs/results/glm_exact.md: of 15 that are off by a factor 3, or
# in sign, CLOSED_RULES leave one uncalled; of the others they call 7 %
SECOND_STEP = Rule(
    "second_step",
    caution=0.4,
    unreliable=0.8,
    text="a second Newton step, taken where the first led, changes the group's effect",
    remedy=FIT_AGAIN,
)
# Of closed models, which fit again in a moment
CLOSED_RULES = (
    SECOND_STEP,
    *(replace(rule, remedy=FIT_AGAIN) for rule in (RISE, WORSE)),
    replace(DRIFT, text="the fit had not converged", remedy=CONVERGE),
)
ONE_STEP = (
    "one step from the end of a training that was stopped: the group's own loss is mostly right, "
    "changes of other losses have been seen at a quarter to a half of the truth"
)
HELD = "a guard held, or a weight beyond 1 takes out more than first order can see"
LET_GO = 'Leave out fewer at a time, give weights up to 1, or use structure="full".'
LOST_EFFECT = "the effect has numbers that are NaN or infinite"
RAISE_PRIOR = "Raise prior_precision, or compute in double precision."
NO_SIGNAL = "nothing was measured to judge it by"
CHANGE_FEWER = "Change fewer examples at a time, or train again on the changed data."
# of a perturbation that is no removal, by signal: nothing replays one, and nothing is left out
CHANGED_REMEDIES = {
    "not_finite": RAISE_PRIOR,
    "drift": "Train to a minimum, or train again on the changed data.",
}
OTHER_RULE = 'Use estimator="auto" of engram.remove, or estimator="exact" of closed models.'

# Remedies where those of the rules are not open.
NO_RICHER = (
    "The structure is the richest there is here: regularise more, use fewer parameters, or obtain "
    'the examples that matter by engram.refine with method="retrain".'
)
CLOSED = (
    "The model is in closed form, and its precision the whole one: use a larger penalty, noise or "
    "prior precision, or fit again without the examples that matter."
)
LOST = (
    "Raise prior_precision, compute in double precision, or leave these examples out: their rows, "
    "and means over all rows, mean nothing."
)
LOST_CLOSED = (
    "Without such an example the others determine no coefficients, are separated, or leave its "
    "mean outside of the support: use penalty > 0, drop columns that it alone determines, or leave "
    "it out. Means over all rows mean nothing."
)

# Of a result without diagnostics.
STOPPED = (
    "the training was stopped: the ranking is mostly good; leave-one-out losses have been seen at "
    "0.7 to 3 times the truth, and their increases further off"
)
NOTHING = "leverages and gradient were not computed, and nothing is known to judge it by"
COMPUTE = "Leave out diagnostics=False; they take at most a quarter of the pass."
