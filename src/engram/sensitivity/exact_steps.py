r"""Steps of the weights to the minimum of the remaining data: the one solver of

.. math:: (W - H_m)\, x_m = b_m

W is the curvature of all data with the prior, :math:`H_m` that of what is left out, an example or
a group, and :math:`b_m` its gradient. The systems are solved together, by conjugate gradients
preconditioned with the posterior's precision S. Where W is S itself its products come for free,
and where S is known in some directions only it is as in :mod:`engram.linalg.low_rank`; else W is
an exact operator of :mod:`engram.curvature.operators`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engram.curvature.operators import CurvatureOperator
from engram.linalg.cg import ApplyTo, Limits, Solution, conjugate_gradients
from engram.posteriors.gaussian import Posterior
from engram.posteriors.trace_estimation import covered_layout

# relative residuals at which a solve with S itself ends
TOLERANCE = 1e-2  # ten times smaller changed the fourth digit of correlations with the truth
DOUBLE_TOLERANCE = 1e-9  # who uses double precision wants equality
LARGEST_ITERATION = 50  # products with an example's own Hessian, of which a few are enough


def own_limits(posterior: Posterior, right: Tensor, iterations: int = LARGEST_ITERATION) -> Limits:
    """Where solves with a posterior's own exact Hessian end; ``TOLERANCE`` is good enough."""
    known = posterior.blocks[0].in_own_type(right)
    double = known.dtype == torch.float64
    return Limits(DOUBLE_TOLERANCE if double else TOLERANCE, iterations)


def solve_without(
    posterior: Posterior,
    own: ApplyTo,
    right: Tensor,
    limits: Limits,
    whole: CurvatureOperator | None = None,
) -> Solution:
    """(W - H_m)^-1 b_m for every row of b.

    Args:
        posterior: its precision preconditions the solves.
        own: H_m v for rows v of the systems numbered.
        right: b, [M, P], in the layout of the parameters that the posterior covers.
        limits: where it ends.
        whole: W; the posterior's precision itself if not given.
    """
    layout = covered_layout(posterior)
    if whole is None and len(posterior.blocks) == 1:
        (block,) = posterior.blocks
        found = block.solve_without(own, block.in_own_type(right), limits)
        return replace(found, vectors=found.vectors.to(right))

    def times(vectors: Tensor, rows: Tensor, weighted: Tensor) -> Tensor:
        image = weighted if whole is None else whole @ vectors
        return image - own(vectors, rows)

    def precondition(vectors: Tensor) -> Tensor:
        return posterior.solve_rows(vectors, layout)

    return conjugate_gradients(times, right, limits, precondition)
