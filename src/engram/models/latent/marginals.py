r"""Gaussian marginals of the outputs, and what leaving an example out does to its own.

Output k of example i is :math:`N(m, v + r)`: v is what the data tell about it, r what they cannot
(the conditional variance of a sparse Gaussian process; zero for a linear model). With
:math:`e, \beta` the derivatives of its expected loss, the memory-perturbation equation gives

- ``linear``: :math:`d = v e`, the variance as it is;
- ``corrected``: :math:`d = v e / (1 - v \beta)`, variance :math:`v / (1 - v \beta)`;
- ``response``: mean and variance together, to first order, when the others respond.

At a stationary posterior let :math:`G = A S^{-1} A'` and :math:`Q = G \circ G`. Changes x of the
output means and z of their variances caused by sources e in the gradient and b in the curvature of
the examples satisfy

.. math:: x = G (e - \tfrac12 \gamma \circ z), \qquad
    z = Q (b - \gamma \circ x - \tfrac12 \kappa \circ z)

because the residual of an example has the derivatives :math:`\beta, \gamma/2` by its mean and
variance, and its curvature :math:`\gamma, \kappa/2` (:math:`\gamma, \kappa` are the third and
fourth derivatives of the expected loss by the mean). One factorisation gives the 2 by 2 response
:math:`R_i` of every example to itself; leaving it out is the source :math:`(e_i, \beta_i)` as they
are at the left-out posterior:

.. math:: (x_i, z_i) = R_i (I - T_i R_i)^{-1} (e_i, \beta_i), \qquad
    T_i = \begin{pmatrix} \beta_i & \gamma_i / 2 \\ \gamma_i & \kappa_i / 2 \end{pmatrix}

The precision of the output, 1 / v, changes by :math:`-z / v^2`. Without :math:`\gamma, \kappa`
all this is :math:`v e / (1 - v \beta)` and :math:`v / (1 - v \beta)` again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.errors import ArgumentError
from engram.likelihoods import ExpectedLoss
from engram.models.diagnosis import Convergence, diagnose, finished
from engram.sensitivity.basis import Basis
from engram.sensitivity.provenance import provenance
from engram.sensitivity.result import Result

ESTIMATORS = ("linear", "corrected")
STRUCTURE = "full"  # of the covariance of the latent function, which couples all examples
MOST_EXAMPLES = 4000  # that may respond: a matrix of twice as many rows is factorised, 512 MB
DIFFERENCE_POWER = 0.2  # of machine epsilon, the step of a difference over the standard deviation:
# a fifth root balances rounding and truncation of a second difference
# largest leverage v beta taken at its word; an example above is held there and flagged
GUARD = 0.99  # away from convergence
CONVERGED_GUARD = 1 - 1e-9  # at convergence, where it is below 1 by construction


@dataclass(frozen=True)
class Marginals:
    """Outputs of N examples under a posterior, with the derivatives of their expected losses.

    Attributes:
        mean: m, [N, K].
        variance: v, [N, K].
        conditional_variance: r, [N, K].
        residual: e, [N, K].
        curvature: beta, [N, K].
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


def responded(marginals: Marginals, kernels: Tensor) -> LeftOut:
    """Every example's own output without it, the other examples having responded.

    Args:
        marginals: at a stationary posterior.
        kernels: G for each output, [K, N, N].
    """
    if len(marginals.mean) > MOST_EXAMPLES:
        raise ArgumentError(
            f"at most {MOST_EXAMPLES} examples for the response estimator",
            str(len(marginals.mean)),
            'use estimator="corrected"',
        )
    plain = leave_one_out(marginals, "corrected")
    third, fourth = _higher_derivatives(marginals)
    deviation, variance = plain.deviation.clone(), plain.variance.clone()
    flagged = plain.flagged.clone()
    for k, kernel in enumerate(kernels):
        residual, curvature = marginals.residual[:, k], marginals.curvature[:, k]
        own = _own_responses(kernel, third[:, k], fourth[:, k])
        coupling = torch.stack(
            [curvature, third[:, k] / 2, third[:, k], fourth[:, k] / 2], 1
        ).reshape(-1, 2, 2)
        remaining = torch.eye(2).to(own) - coupling @ own
        source = torch.stack([residual, curvature], 1)[:, :, None]
        held = torch.linalg.det(remaining) < 1 - marginals.guard
        safe = torch.where(held[:, None, None], torch.eye(2).to(own), remaining)
        change = (own @ torch.linalg.solve(safe, source))[:, :, 0]
        # the change z of v is linear in that of the precision: 1 / v becomes 1 / v - z / v^2
        share = change[:, 1] / marginals.variance[:, k]
        held |= share > marginals.guard
        spread = marginals.variance[:, k] / (1 - share.clamp(max=marginals.guard))
        deviation[:, k] = torch.where(held, deviation[:, k], change[:, 0])
        variance[:, k] = torch.where(held, variance[:, k], spread)
        flagged |= held
    return LeftOut(deviation, variance, flagged)


def _own_responses(kernel: Tensor, third: Tensor, fourth: Tensor) -> Tensor:
    """R_i, the 2 by 2 blocks on the diagonal of M^-1 diag(G, Q), [N, 2, 2]."""
    count = len(kernel)
    square = kernel**2
    identity = torch.eye(count).to(kernel)
    matrix = torch.cat(
        [
            torch.cat([identity, 0.5 * kernel * third], 1),
            torch.cat([square * third, identity + 0.5 * square * fourth], 1),
        ]
    )
    solved = torch.linalg.solve(matrix, torch.block_diag(kernel, square))
    blocks = solved.reshape(2, count, 2, count).diagonal(dim1=1, dim2=3)
    return blocks.permute(2, 0, 1)


def _higher_derivatives(marginals: Marginals) -> tuple[Tensor, Tensor]:
    """gamma and kappa by central differences of the curvature, [N, K]."""
    total = marginals.total_variance
    step = torch.finfo(total.dtype).eps ** DIFFERENCE_POWER * total.sqrt()
    above = marginals.loss.curvature(marginals.mean + step, total, marginals.targets)
    below = marginals.loss.curvature(marginals.mean - step, total, marginals.targets)
    third = (above - below) / (2 * step)
    fourth = (above - 2 * marginals.curvature + below) / step**2
    return third, fourth
