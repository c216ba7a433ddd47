r"""Leaving an example out when the others respond: mean and variance together, to first order.

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

import torch
from torch import Tensor

from engram.core.errors import ArgumentError
from engram.models.latent.marginals import LeftOut, Marginals, leave_one_out

MOST_EXAMPLES = 4000  # a matrix of twice as many rows is factorised


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
    step = torch.finfo(total.dtype).eps ** 0.2 * total.sqrt()
    above = marginals.loss.curvature(marginals.mean + step, total, marginals.targets)
    below = marginals.loss.curvature(marginals.mean - step, total, marginals.targets)
    third = (above - below) / (2 * step)
    fourth = (above - 2 * marginals.curvature + below) / step**2
    return third, fourth
