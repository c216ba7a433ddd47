r"""The system of the remaining data, :math:`(S - H_i)\,x = \nabla \ell_i`, for S the exact Hessian.

It is solved by conjugate gradients preconditioned with S, a few products with :math:`H_i` each;
where S is known in some directions only, as in :mod:`engram.linalg.low_rank`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engram.linalg.block import Own
from engram.linalg.cg import Solution
from engram.posteriors.gaussian import Posterior

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
    (block,) = posterior.blocks
    given = block.in_own_type(right)
    found = block.solve_without(own, given, tolerance_of(given), largest_iteration)
    return replace(found, vectors=found.vectors.to(right))
