"""Assess a result: a verdict from signals that cost some passes over the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, is_auto, seed_number, whole
from engram.core.data.batches import Data
from engram.core.memory import backing_off
from engram.evidence.assessment import Assessment
from engram.evidence.correlation import SMALLEST_SAMPLE
from engram.evidence.matching import check_outputs
from engram.evidence.signals import Objective, Signals, measure
from engram.posteriors.gaussian import Posterior
from engram.problem import opened_problem
from engram.sensitivity.result import Result, check_result
from engram.trust import judge
from engram.trust.thresholds import (
    FACTOR,
    LINEARISATION,
    MEASURED_RULES,
    PRIOR,
    RANKS,
    SIZES,
)
from engram.trust.verdict import GOOD, UNRELIABLE, Rule, Verdict

# Passes over the data: surer correlations against time. With 260 of them, 24 examples and 10 rounds
PASSES = 260
MOST_ITERATIONS = 10  # of conjugate gradients that such a budget has; scaled by its root
FEWEST_ITERATIONS = 2
OF_SPECTRUM = 2  # products a round, besides those of the sample
FEWEST_PASSES = FEWEST_ITERATIONS * (SMALLEST_SAMPLE + OF_SPECTRUM)
VERIFY = "Check some by engram.verify(model, data, result, train=training)."
ALONG = (
    "The second opinion is of the end of the training, and nothing is judged by it: in the study "
    "of stopped nets it told no estimate along a training that was good from one that was not. "
    "engram.verify and engram.certify with train= do."
)
ENOUGH = "use budget=260, or fewer for a rougher answer"


@backing_off
def assess(
    model: nn.Module,
    data: Data,
    result: Result,
    posterior: Posterior | Any,
    *,
    budget: int | str = AUTO,
    sample: int | str = AUTO,
    iterations: int | str = AUTO,
    batch_size: int | str = AUTO,
    seed: int = 0,
    progress: bool = True,
) -> Assessment:
    r"""How far to believe a result, without retraining.

    On a sample of examples, the posterior's own steps :math:`S^{-1} \nabla \ell_i` are held against
    the model at :math:`\theta + \Delta\theta` and against steps of the exact Hessian H of the
    objective; and the spectrum of :math:`S^{-1} H` says how far S is from H and whether H is
    indefinite. The thresholds come from a study with true retraining: docs/trust.md. For estimates
    along a recorded training it adds next to nothing, and says so.

    Args:
        model: the one that the result is about; it is not changed.
        data: its training data.
        result: from :func:`engram.sensitivities`.
        posterior: that the result was computed with.
        budget: passes over the data that it may take, forward and backward through a product with
            the Hessian each; ``"auto"`` is 260. Sample and iterations follow from it.
        sample: examples, spread evenly over the ranks of the score, where they are not left to the
            budget.
        iterations: of conjugate gradients, likewise; each is one product per example of the
            sample, and two for the spectrum.
        batch_size, seed, progress: as in :func:`engram.sensitivities`.

    Returns:
        ``level``, ``reasons`` with remedies, ``levels`` of the examples, and ``signals``.

    Example:
        >>> import torch
        >>> from engram import laplace, sensitivities
        >>> from engram.likelihoods import Gaussian
        >>> _ = torch.manual_seed(0)
        >>> x, model = torch.randn(50, 3).double(), nn.Linear(3, 1, bias=False).double()
        >>> data = (x, x.sum(1, keepdim=True) + torch.randn(50, 1).double())
        >>> solution = torch.linalg.solve(x.T @ x + torch.eye(3).double(), x.T @ data[1])
        >>> _ = model.weight.data.copy_(solution.T)
        >>> posterior = laplace(model, data, likelihood=Gaussian(), prior_precision=1.0)
        >>> result = sensitivities(model, data, posterior, estimator="corrected")
        >>> assess(model, data, result, posterior).level
        'good'
    """
    seed = seed_number(seed)
    check_result(result)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        num_data, posterior = problem.num_data, problem.posterior
        if not is_auto(sample):
            whole("sample", sample, SMALLEST_SAMPLE, num_data, 'use sample="auto"')
        spent = _spent(budget, sample, iterations)
        size = min(spent.sample, num_data)
        result.check_data(num_data)
        result.basis.check_posterior(posterior)
        check_outputs(result, problem.model, problem.batches)
        objective = Objective(problem.session, posterior, _prior_share(result, posterior))
        signals = measure(objective, result, size, spent.iterations, seed, progress)
    notes = (ALONG,) if result.basis.along else ()
    return Assessment(refined_verdict(result, signals), signals, notes)


@dataclass(frozen=True)
class Spent:
    """What an assessment takes: ``iterations * (sample + 2)`` passes over the data."""

    sample: int
    iterations: int


def _spent(budget: int | str, sample: int | str, iterations: int | str) -> Spent:
    """Sample and iterations, as they are given or as the budget has room for.

    Example:
        >>> _spent("auto", "auto", "auto")
        Spent(sample=24, iterations=10)
        >>> _spent(40, "auto", "auto")
        Spent(sample=8, iterations=4)
    """
    passes = PASSES if is_auto(budget) else whole("budget", budget, FEWEST_PASSES, MANY, ENOUGH)
    if is_auto(iterations):
        steps = round(MOST_ITERATIONS * math.sqrt(passes / PASSES))
        rounds = min(MOST_ITERATIONS, max(FEWEST_ITERATIONS, steps))
        if not is_auto(sample):
            rounds = min(rounds, max(1, passes // (int(sample) + OF_SPECTRUM)))
    else:
        rounds = whole("number of iterations", iterations, 1, MANY, 'use iterations="auto"')
    if not is_auto(sample):
        return Spent(int(sample), rounds)
    return Spent(max(SMALLEST_SAMPLE, passes // rounds - OF_SPECTRUM), rounds)


def _prior_share(result: Result, posterior: Posterior) -> float:
    """The training's prior precision over the posterior's, where the weights tell it."""
    if PRIOR.level(judge.signals(result)["prior_mismatch"]) == GOOD:
        return 1.0
    return result.diagnostics.fitting_prior / posterior.prior_precision


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
    """Where both scores are finite, [n]."""
    return torch.isfinite(signals.score) & torch.isfinite(signals.second_score)


def own_levels(result: Result, signals: Signals) -> Tensor:
    """The result's own levels; for the sample also how many times the two scores differ by."""
    levels = judge.own_levels(result)
    tiny = torch.finfo(signals.score.dtype).tiny
    ratio = signals.score.clamp(min=tiny) / signals.second_score.to(signals.score).clamp(min=tiny)
    if result.basis.along:  # which may differ from the end
        return levels
    factor = FACTOR.levels(torch.maximum(ratio, 1 / ratio))
    factor = torch.where(_comparable(signals), factor, torch.full_like(factor, UNRELIABLE))
    levels[signals.positions] = torch.maximum(levels[signals.positions], factor)
    return levels


def _measured_rules(result: Result) -> tuple[Rule, ...]:
    """The rules; of a training that was stopped no minimum is asked for, and there is a check.

    The second opinion is of the end. An estimate along the training that differs from it is no
    worse for that (docs/results/trust-assess.md), so that it is not judged by it.
    """
    if not result.basis.stopped:
        return MEASURED_RULES
    rules = (LINEARISATION,) if result.basis.along else (RANKS, SIZES, LINEARISATION)
    return tuple(replace(rule, remedy=VERIFY) for rule in rules)


def refined_verdict(result: Result, signals: Signals) -> Verdict:
    """The verdict from what the result carries and what was measured."""
    known = judge.signals(result) | measured(signals)
    rules = (*judge.rules_of(result), *_measured_rules(result))
    return judge.verdict_by(rules, known, own_levels(result, signals), result)
