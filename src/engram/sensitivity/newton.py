r"""The system of the remaining data, :math:`(S - H_i)\,x = \nabla \ell_i`, for S the exact Hessian.

It is solved by conjugate gradients preconditioned with S, a few products with :math:`H_i` each;
where S is known in some directions only, as in :mod:`engram.sensitivity.low_rank_newton`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engram.linalg.cg import Solution, conjugate_gradients
from engram.linalg.low_rank import LowRankBlock
from engram.posteriors.gaussian import Posterior
from engram.posteriors.trace_estimation import covered_layout
from engram.sensitivity.low_rank_newton import KeptSystems, Own

TOLERANCE = 1e-2  # ten times smaller changed the fourth digit of correlations with the truth
DOUBLE_TOLERANCE = 1e-9  # who uses double precision wants equality
LARGEST_ITERATION = 50


def tolerance_of(right: Tensor) -> float:
    """Relative residual at which a solve ends; one of ``TOLERANCE`` is good enough to be used."""
    return DOUBLE_TOLERANCE if right.dtype == torch.float64 else TOLERANCE


def solve_without(
    posterior: Posterior, own: Own, right: Tensor, largest_iteration: int = LARGEST_ITERATION
) -> Solution:
    """(S - H)^-1 b for every row of b [B, P], with products of each row's own H.

    Args:
        posterior: with the exact Hessian.
        own: H v for rows v of the systems numbered.
        right: b, in the layout of the parameters that the posterior covers.
        largest_iteration: at most so many products per system.
    """
    layout, block = covered_layout(posterior), posterior.blocks[0]
    if isinstance(block, LowRankBlock):
        # it is known no better than to single precision, but for small models
        given = right.to(block.basis)
        found = KeptSystems(block, own, tolerance_of(given), largest_iteration).solve(given)
        return replace(found, vectors=found.vectors.to(right))

    def times(vectors: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
        return whole - own(vectors, rows)

    def precondition(vectors: Tensor) -> Tensor:
        return layout.flatten(posterior.solve(layout.unflatten(vectors)))

    return conjugate_gradients(times, precondition, right, tolerance_of(right), largest_iteration)
