"""Leave-one-out of a fitted linear predictor: the estimators of neural nets, with V exact."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import MANY, is_number, whole
from engram.engine.gradient_accumulator import DiscardGradients
from engram.errors import ArgumentError
from engram.likelihoods.weighted import Weighted
from engram.models.glm.fit import Fit
from engram.models.influence.refits import Settled, settle
from engram.sensitivity.basis import Basis
from engram.sensitivity.diagnostics import Diagnostics
from engram.sensitivity.estimators import ESTIMATORS, FROM_VARIANCE, check_estimator
from engram.sensitivity.estimators.base import GUARD, Estimate, KnownBatch, Setting
from engram.sensitivity.estimators.corrected import corrected
from engram.sensitivity.provenance import provenance
from engram.sensitivity.result import OBTAINED, Result
from engram.sensitivity.variance import KnownVariance

EXACT = "exact"
HALVINGS = 60  # of a deviation that leads out of the support: what is left is below rounding
# leverages
EXACT_GUARD = 1 - 1e-9  # largest taken at its word for least squares, exact but for rounding
ABOVE_ONE = 1 + 1e-9  # from here on above 1, and no rounding
NO_PARAMETERS = 1e-12  # sum of all leverages below which a fit has no parameters to speak of


def sensitivities_of(
    fit: Fit,
    *,
    estimator: str = "exact",
    rounds: int = 3,
    share: float = 1.0,
    progress: bool = True,
) -> Result:
    """How far each example's outputs, prediction and loss would move without it.

    Args:
        fit: of a linear, generalised linear or multinomial model.
        estimator: ``exact`` (one Newton step, which is all for least squares; examples that a
            second one would still move are left out by fitting again, from where the model is),
            ``corrected`` (one Newton step), ``linear``, ``iterated`` or ``paper``.
        rounds: of ``iterated``.
        share: how much of each example is taken out; 1 leaves it out.
        progress: show a bar when refits take longer than a few seconds.

    Returns:
        A result; ``obtained`` says which examples were refitted. An example without which the rest
        is separated has an infinite loss, one that alone determines some combination of columns
        has none (NaN); both are flagged. Of a row that stands for several examples (frequencies)
        one is left out. Losses are negative log densities: where the likelihood has a dispersion
        phi, an example of weight w has phi / w; elsewhere losses are per unit of weight.

    Example:
        >>> from engram.models import fit_linear
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [6.0]])
        >>> y = torch.tensor([1.0, 3.0, 5.5, 12.0])
        >>> result = sensitivities_of(fit_linear(x, y))
        >>> without = fit_linear(x[:3], y[:3], dispersion=1.0).predictor(x[3:])[0]
        >>> torch.allclose(result.outputs[3] + result.deviation[3], without)
        True
    """
    check_estimator(estimator, (*FROM_VARIANCE, EXACT))
    rounds = whole("number of rounds", rounds, 0, MANY, "use rounds=3")
    if not (is_number(share) and 0 < share <= 1):
        raise ArgumentError(
            "a share above 0 and at most 1", repr(share), "use parameter_deviation for others"
        )
    design = fit.objective.design
    likelihood = Weighted(fit.likelihood, share * design.taken, design.precisions)
    residual = likelihood.residual(fit.outputs, fit.targets)
    examples = KnownBatch(KnownVariance(fit.variances), fit.outputs, fit.targets, residual)
    guard = EXACT_GUARD if fit.likelihood.is_quadratic else GUARD
    setting = Setting(likelihood, fit.posterior, rounds, DiscardGradients(), guard)
    step = _inside_support(fit, _undetermined(fit, corrected(examples, setting), share))
    settled = Settled(step, torch.zeros_like(step.flagged), 0.0)
    if not fit.likelihood.is_quadratic:
        settled = settle(fit, step, share, progress)
    estimate = settled.estimate
    if estimator != EXACT:
        estimate = ESTIMATORS[estimator](examples, setting)
        if estimator == "iterated":
            estimate = _held(estimate, step)
        estimate = _inside_support(fit, _undetermined(fit, estimate, share))
    settings = {
        "estimator": estimator,
        "rounds": rounds if estimator == "iterated" else None,
        "structure": "full",
        "posterior": dict(fit.posterior.settings),
        "prior_precision": fit.posterior.prior_precision,
        "likelihood": repr(fit.likelihood),
        "share": share,
        "num_data": fit.posterior.num_data,
        "columns": list(fit.names),
    }
    basis = Basis.of(estimator, fit.posterior, fit.likelihood, fit.likelihood.threshold)
    return _result(fit, estimate, settled, settings, basis)


def _held(iterated: Estimate, step: Estimate) -> Estimate:
    """Where the rounds grow apart, one Newton step instead; V is exact here, so it can be had."""
    held = iterated.flagged
    return Estimate(
        torch.where(held[:, None], step.deviation, iterated.deviation),
        torch.where(held[:, None], step.prediction_deviation, iterated.prediction_deviation),
        torch.where(held, step.loo_loss, iterated.loo_loss),
        held,
        step.eigenvalues,
    )


def _undetermined(fit: Fit, estimate: Estimate, share: float) -> Estimate:
    """No number for an example that alone determines some combination of columns.

    Its leverage is 1. Above 1, which only a fit that is at no minimum has, the guard holds it.
    """
    if share != 1:
        return estimate
    alone = fit.factor.determined_alone(fit.largest_leverage)
    return Estimate(
        torch.where(alone[:, None], torch.nan, estimate.deviation),
        torch.where(alone[:, None], torch.nan, estimate.prediction_deviation),
        torch.where(alone, torch.nan, estimate.loo_loss),
        estimate.flagged | alone,
        estimate.eigenvalues,
    )


def _inside_support(fit: Fit, estimate: Estimate) -> Estimate:
    """Deviations that lead out of the targets' support are halved until inside, and flagged."""
    deviation = estimate.deviation
    wrong = ~fit.likelihood.inside(fit.outputs + deviation) & ~deviation.isnan().any(1)
    if not wrong.any():
        return estimate
    flagged = estimate.flagged | wrong
    for _ in range(HALVINGS):
        deviation = torch.where(wrong[:, None], deviation / 2, deviation)
        wrong = ~fit.likelihood.inside(fit.outputs + deviation) & ~deviation.isnan().any(1)
        if not wrong.any():
            break
    moved = fit.outputs + deviation
    change = fit.likelihood.mean(moved) - fit.means
    loss = fit.weighted.loss(moved, fit.targets)
    return Estimate(deviation, change, loss, flagged, estimate.eigenvalues)


def _result(
    fit: Fit, estimate: Estimate, settled: Settled, settings: dict[str, Any], basis: Basis
) -> Result:
    targets = fit.targets[:, 0] if fit.targets.shape[1] == 1 else fit.targets.argmax(1)
    error = settled.distance(estimate, fit.objective.design.used)
    followed = settled.refitted & (estimate is settled.estimate)
    whole_classes = fit.targets.shape[1] == 1 or bool((fit.targets.amax(1) == 1).all())
    return Result(
        indices=torch.arange(len(targets)),
        targets=targets if whole_classes else fit.targets,
        outputs=fit.outputs,
        deviation=estimate.deviation,
        prediction_deviation=estimate.prediction_deviation,
        score=estimate.prediction_deviation.abs().sum(1),
        loss=fit.weighted.loss(fit.outputs, fit.targets),
        loo_loss=estimate.loo_loss,
        leverage=fit.leverage / fit.objective.design.counts.clamp(min=1.0),
        flagged=estimate.flagged,
        diagnostics=_diagnostics(fit, estimate, error),
        coverage={"coefficients": "closed form"},
        provenance=provenance(fit if fit.source is None else fit.source, settings),
        basis=basis,
        counts=fit.objective.design.used,
        obtained=torch.where(followed, OBTAINED.index("retrain"), 0).to(torch.uint8),
    )


def _diagnostics(fit: Fit, estimate: Estimate, step_error: float) -> Diagnostics:
    gradient = fit.objective.gradient(fit.coefficients, fit.outputs)
    largest = fit.largest_leverage
    return Diagnostics(
        leverage_examples=len(fit.targets),
        share_above_one=float((fit.leverage > ABOVE_ONE).double().mean()),
        share_inconsistent=float((largest > ABOVE_ONE).double().mean()),
        effective_parameters=float(fit.leverage.sum()),
        effective_parameters_error=0.0,
        gradient_norm=float(gradient.norm()),
        relative_gradient=_decrement(fit, gradient),
        parameters_exact=1.0,
        parameters_fallback=0.0,
        parameters_frozen=0.0,
        parameters_unused=0.0,
        flagged_share=float(estimate.flagged.double().mean()),
        step_error=step_error,
    )


def _decrement(fit: Fit, gradient: Tensor) -> float:
    r"""How far the minimum is in standard deviations of the posterior, between 0 and 1.

    The Newton decrement :math:`q = g'S^{-1}g / \phi` does not change when columns are scaled, and
    knows no penalty to compare with: :math:`\sqrt{q / (q + p)}`, p the effective parameters.
    """
    flat = gradient.reshape(1, -1)
    square = float((fit.factor.solve(flat) * flat).sum()) / fit.dispersion
    parameters = max(float(fit.leverage.sum()), NO_PARAMETERS)
    return math.sqrt(max(square, 0.0) / (max(square, 0.0) + parameters))
