r"""Roots of single examples' Gauss-Newton matrices.

.. math:: J_i' \Lambda_i J_i = R_i' R_i, \qquad R_i = L_i' J_i, \quad \Lambda_i = L_i L_i'
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.parameters import Layout
from engram.engine.session import Observed
from engram.likelihoods import Likelihood


def gauss_newton_roots(observed: Observed, likelihood: Likelihood, layout: Layout) -> Tensor:
    """R of every example of a batch, [B, R, P]: a backward pass for each of its R rows.

    Example:
        For linear regression it is the input.

        >>> from engram.core.parameters import trainable
        >>> from engram.engine.session import session
        >>> x, model = torch.randn(3, 2).double(), torch.nn.Linear(2, 1, bias=False).double()
        >>> with session(model, (x, x.sum(1, keepdim=True)), "gaussian") as opened:
        ...     observed = opened.observe(opened.batches.take(torch.arange(3)))
        ...     found = gauss_newton_roots(observed, opened.likelihood, Layout.of(trainable(model)))
        >>> torch.allclose(found[:, 0], x)
        True
    """
    factor = likelihood.hessian_factor(observed.outputs, observed.targets).detach()
    rows = [
        observed.trace.own_gradient_rows(factor[:, :, number], layout)
        for number in range(factor.shape[2])
    ]
    return torch.stack(rows, dim=1)
