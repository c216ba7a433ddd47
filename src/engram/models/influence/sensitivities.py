"""From a fit to the result that neural nets give: the same rules, with V known in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.engine.totals import GradientSum
from engram.errors import ArgumentError
from engram.models.influence.leverages import remaining
from engram.models.influence.refits import with_refits
from engram.models.predictor.fit import Fit
from engram.models.responses.likelihood import ResponseLikelihood, Weighted
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.basis import Basis
from engram.sensitivity.diagnostics import Diagnostics
from engram.sensitivity.estimators import GUARD, Estimate, Setting, corrected, estimator_named
from engram.sensitivity.provenance import provenance
from engram.sensitivity.result import Result

EXACT_GUARD = 1 - 1e-9  # least squares is exact up to rounding
HALVINGS = 60


@dataclass(frozen=True, eq=False)
class KnownVariance:
    """Products with V of every example, [N, K, K]."""

    variances: Tensor

    def deviation(
        self, residual: Tensor, posterior: Posterior, total: GradientSum | None = None
    ) -> Tensor:
        """V e."""
        if residual.shape[1] == 1:
            return self.variances[:, :, 0] * residual
        return (self.variances @ residual[:, :, None])[:, :, 0]

    def inner_products(self, vectors: Tensor, posterior: Posterior) -> Tensor:
        """F' V F; where F is the identity, V itself."""
        if vectors.shape[1] == 1:
            return vectors.mT * self.variances * vectors
        return vectors.mT @ self.variances @ vectors

    def add_gradient(self, residual: Tensor, posterior: Posterior, total: GradientSum) -> None:
        """Nothing: the fit knows its gradient."""


@dataclass(frozen=True, eq=False)
class Examples:
    """All examples of a fit, a share of each taken out."""

    trace: KnownVariance
    outputs: Tensor
    targets: Tensor
    residual: Tensor


def sensitivities_of(
    fit: Fit,
    *,
    estimator: str = "corrected",
    rounds: int = 3,
    share: float = 1.0,
    refit_above: float | None = None,
    progress: bool = True,
) -> Result:
    """How far each example's outputs, prediction and loss would move without it.

    Args:
        fit: of a linear, generalised linear or multinomial model.
        estimator: ``corrected`` (exact for least squares, one Newton step otherwise), ``linear``,
            ``iterated`` or ``paper``.
        rounds: of ``iterated``.
        share: how much of each example is taken out; 1 leaves it out.
        refit_above: examples of larger leverage are left out by fitting again, from where the model
            is. One Newton step is least sure of these, and there are at most as many as effective
            parameters over this number; 0.3 is a good value near separation.
        progress: show a bar when refits take longer than a few seconds.

    Returns:
        A result. Its losses are negative log densities: where the response has a dispersion phi, an
        example of weight w has phi / w; elsewhere losses are per unit of weight.

    Example:
        >>> from engram.models import fit_linear
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [6.0]])
        >>> y = torch.tensor([1.0, 3.0, 5.5, 12.0])
        >>> result = sensitivities_of(fit_linear(x, y))
        >>> without = fit_linear(x[:3], y[:3], dispersion=1.0).predictor(x[3:])[0]
        >>> torch.allclose(result.outputs[3] + result.deviation[3], without)
        True
    """
    rule = estimator_named(estimator)
    if rounds < 0:
        raise ArgumentError("rounds of 0 or more", repr(rounds), "use rounds=3")
    if not 0 < share <= 1:
        raise ArgumentError(
            "a share above 0 and at most 1", repr(share), "use parameter_deviation for others"
        )
    design = fit.objective.design
    if share == 1 and len(fit.coefficients) == 1:  # above 1, at no minimum, the guard holds it
        remaining(torch.where(fit.leverage <= 1 + 1e-9, fit.leverage, 0.0))
    likelihood = Weighted(fit.likelihood, share * design.weights, design.precisions)
    residual = likelihood.residual(fit.outputs, fit.targets)
    examples = Examples(KnownVariance(fit.variances), fit.outputs, fit.targets, residual)
    guard = EXACT_GUARD if is_least_squares(fit) else GUARD
    setting = Setting(likelihood, fit.posterior, rounds, GradientSum(), guard)
    estimate = rule(examples, setting)
    if estimator == "iterated" and bool(estimate.flagged.any()):
        estimate = _held(estimate, corrected(examples, setting))
    estimate = _inside_support(fit, estimate)
    if refit_above is not None:
        if share != 1:
            raise ArgumentError("share of 1 with refit_above", repr(share), "leave one of them out")
        estimate = with_refits(fit, estimate, refit_above, progress)
    settings = {
        "estimator": estimator,
        "rounds": rounds if estimator == "iterated" else None,
        "structure": "full",
        "posterior": dict(fit.posterior.settings),
        "prior_precision": fit.posterior.prior_precision,
        "likelihood": repr(fit.likelihood),
        "share": share,
        "refit_above": refit_above,
        "num_data": len(fit.targets),
        "columns": list(fit.names),
    }
    basis = Basis.of(estimator, fit.posterior, fit.likelihood, _threshold(fit))
    return _result(fit, estimate, settings, basis)


def is_least_squares(fit: Fit) -> bool:
    """Whether leaving out is exact."""
    likelihood = fit.objective.likelihood
    if not isinstance(likelihood, ResponseLikelihood):
        return False
    return likelihood.name == "gaussian" and likelihood.response.link.name == "identity"


def _threshold(fit: Fit) -> float | None:
    """The output above which a binary classifier says 1; None for all else."""
    likelihood = fit.objective.likelihood
    if not isinstance(likelihood, ResponseLikelihood) or likelihood.name != "bernoulli":
        return None
    return float(likelihood.response.link.predictor(torch.tensor(0.5, dtype=torch.float64)))


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


def _inside_support(fit: Fit, estimate: Estimate) -> Estimate:
    """Deviations that lead out of the response's support are halved until inside, and flagged."""
    deviation = estimate.deviation
    wrong = ~fit.objective.inside(fit.outputs + deviation)
    if not wrong.any():
        return estimate
    flagged = estimate.flagged | wrong
    for _ in range(HALVINGS):
        deviation = torch.where(wrong[:, None], deviation / 2, deviation)
        wrong = ~fit.objective.inside(fit.outputs + deviation)
        if not wrong.any():
            break
    moved = fit.outputs + deviation
    change = fit.likelihood.mean(moved) - fit.means
    loss = fit.weighted.loss(moved, fit.targets)
    return Estimate(deviation, change, loss, flagged, estimate.eigenvalues)


def _result(fit: Fit, estimate: Estimate, settings: dict[str, Any], basis: Basis) -> Result:
    targets = fit.targets[:, 0] if fit.targets.shape[1] == 1 else fit.targets.argmax(1)
    whole = fit.targets.shape[1] == 1 or bool((fit.targets.amax(1) == 1).all())
    return Result(
        indices=torch.arange(len(targets)),
        targets=targets if whole else fit.targets,
        outputs=fit.outputs,
        deviation=estimate.deviation,
        prediction_deviation=estimate.prediction_deviation,
        score=estimate.prediction_deviation.abs().sum(1),
        loss=fit.weighted.loss(fit.outputs, fit.targets),
        loo_loss=estimate.loo_loss,
        leverage=fit.leverage,
        flagged=estimate.flagged,
        diagnostics=_diagnostics(fit, estimate),
        coverage={"coefficients": "closed form"},
        provenance=provenance(fit if fit.source is None else fit.source, settings),
        basis=basis,
    )


def _diagnostics(fit: Fit, estimate: Estimate) -> Diagnostics:
    objective, design = fit.objective, fit.objective.design
    gradient = objective.gradient(fit.coefficients, fit.outputs)
    regulariser = design.penalty * fit.coefficients
    norm = float(gradient.norm())
    parts = float((gradient - regulariser).norm() + regulariser.norm())
    if not bool(design.penalty.any()):  # then the gradients cancel among examples only
        pull = design.weights[:, None] * objective.likelihood.residual(fit.outputs, fit.targets)
        parts = float((pull.square().sum(1) @ design.matrix.square()).sum().sqrt())
    largest = fit.leverage if estimate.eigenvalues is None else estimate.eigenvalues.amax(1)
    return Diagnostics(
        leverage_examples=len(fit.targets),
        share_above_one=float((fit.leverage > 1).double().mean()),
        share_inconsistent=float((largest > 1 + 1e-9).double().mean()),
        effective_parameters=float(fit.leverage.sum()),
        effective_parameters_error=0.0,
        gradient_norm=norm,
        relative_gradient=norm / parts if parts > 0 else 0.0,
        parameters_exact=1.0,
        parameters_fallback=0.0,
        parameters_frozen=0.0,
        parameters_unused=0.0,
        flagged_share=float(estimate.flagged.double().mean()),
    )
