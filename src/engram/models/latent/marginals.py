r"""Gaussian marginals of the outputs, and what leaving an example out does to its own.

Output k of example i is :math:`N(m, v + r)`: v is what the data tell about it, r what they cannot
(the conditional variance of a sparse Gaussian process; zero for a linear model). With
:math:`e, \beta` the derivatives of its expected loss, the memory-perturbation equation gives

- ``linear``: :math:`d = v e`, the variance as it is;
- ``corrected``: :math:`d = v e / (1 - v \beta)`, variance :math:`v / (1 - v \beta)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core.errors import ArgumentError
from engram.likelihoods import ExpectedLoss
from engram.models.diagnosis import Convergence, diagnose, finished
from engram.sensitivity.basis import Basis
from engram.sensitivity.provenance import provenance
from engram.sensitivity.result import Result

ESTIMATORS = ("linear", "corrected")
STRUCTURE = "full"  # of the covariance of the latent function, which couples all examples
GUARD = 0.99  # largest v beta taken at its word away from convergence
CONVERGED_GUARD = 1 - 1e-9  # at convergence v beta is below 1 by construction


@dataclass(frozen=True)
class Marginals:
    """Outputs of N examples under a posterior, with the derivatives of their expected losses.

    Attributes:
        mean, variance, conditional_variance: m, v and r, [N, K].
        residual, curvature: e and beta, [N, K].
        targets: in the form that ``loss`` prepares.
        loss: the expected loss.
        guard: the largest v beta that is taken at its word.
    """

    mean: Tensor
    variance: Tensor
    conditional_variance: Tensor
    residual: Tensor
    curvature: Tensor
    targets: Tensor
    loss: ExpectedLoss
    guard: float = CONVERGED_GUARD

    @property
    def total_variance(self) -> Tensor:
        """v + r."""
        return self.variance + self.conditional_variance


@dataclass(frozen=True)
class LeftOut:
    """An example's own marginal without it: deviation of the mean, and the variance v."""

    deviation: Tensor
    variance: Tensor
    flagged: Tensor


def leave_one_out(marginals: Marginals, estimator: str) -> LeftOut:
    """The marginal of every example when it is left out.

    Example:
        >>> from engram.likelihoods import ExpectedGaussian
        >>> one, loss = torch.ones(1, 1), ExpectedGaussian()
        >>> seen = Marginals(0.5 * one, 0.5 * one, 0 * one, -0.5 * one, one, one, loss)
        >>> left = leave_one_out(seen, "corrected")  # back to the prior N(0, 1)
        >>> float(seen.mean + left.deviation), float(left.variance)
        (0.0, 1.0)
    """
    if estimator not in ESTIMATORS:
        raise ArgumentError(
            f"estimator to be one of {', '.join(ESTIMATORS)}, or response where there is one",
            repr(estimator),
            'use "corrected"',
        )
    variance, residual = marginals.variance, marginals.residual
    if estimator == "linear":
        none = torch.zeros(len(variance), dtype=torch.bool, device=variance.device)
        return LeftOut(variance * residual, variance, none)
    share = variance * marginals.curvature
    remaining = 1 - share.clamp(max=marginals.guard)
    flagged = (share > marginals.guard).any(1)
    return LeftOut(variance * residual / remaining, variance / remaining, flagged)


def marginal_result(
    marginals: Marginals,
    left: LeftOut,
    convergence: Convergence,
    model: object,
    estimator: str,
    settings: Mapping[str, Any],
) -> Result:
    """The marginals with and without each example as a result.

    ``loss`` and ``loo_loss`` are predictive: :math:`-\\log \\mathbb{E}[p(y | f)]` for likelihoods
    and the expected loss for losses that are none.
    """
    loss, targets, mean = marginals.loss, marginals.targets, marginals.mean
    total = marginals.total_variance
    without = mean + left.deviation
    spread = left.variance + marginals.conditional_variance
    change = loss.prediction(without, spread) - loss.prediction(mean, total)
    columns = {
        "indices": torch.arange(len(mean)),
        "targets": targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets,
        "outputs": mean,
        "deviation": left.deviation,
        "prediction_deviation": change,
        "score": change.abs().sum(1),
        "loss": loss.predictive_loss(mean, total, targets),
        "loo_loss": loss.predictive_loss(without, spread, targets),
        "leverage": (marginals.variance * marginals.curvature).sum(1),
        "flagged": left.flagged,
    }
    about = {
        "estimator": estimator,
        "structure": STRUCTURE,
        "num_data": len(mean),
        "likelihood": repr(loss),
    }
    return Result(
        **finished(columns),
        diagnostics=diagnose(marginals.variance * marginals.curvature, left.flagged, convergence),
        coverage={},
        provenance=provenance(model, about | dict(settings)),
        basis=Basis(estimator=estimator, structure=STRUCTURE, whole_matrix=True),
    )
