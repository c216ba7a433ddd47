r"""The Newton step of the remaining data where the Hessian is known in some directions only.

With U the kept directions, A the precision within them and E what it makes of them outside, an
example's own Hessian :math:`H_i` is taken out of both, and the rest :math:`\rho` stays:

.. math:: A_i = A - U' H_i U, \qquad E_i = E - (I - U U') H_i U

.. math:: \tilde S_i = \begin{pmatrix} A_i & E_i' \\ E_i & \rho + E_i A_i^{-1} E_i' \end{pmatrix}

So what is taken out was put in: of the example's curvature outside U nothing is known to be in
the precision. Systems with :math:`A_i` are solved by conjugate gradients preconditioned with A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engram.linalg.cg import Solution, conjugate_gradients
from engram.linalg.low_rank import LowRankBlock

CORRECTION = 3e-2  # relative residual of what the outside gives back, a part of the step
#: vectors [R, P] of the examples numbered [R] -> each example's own Hessian times its vector
Own = Callable[[Tensor, Tensor], Tensor]


class KeptSystems:
    """The systems of the examples of a batch.

    Args:
        block: the precision.
        own: products with the examples' own Hessians.
        tolerance: relative residual at which a system counts as solved.
        largest_iteration: at most so many products per system.
    """

    def __init__(
        self, block: LowRankBlock, own: Own, tolerance: float, largest_iteration: int
    ) -> None:
        self.block, self.own = block, own
        self.tolerance, self.largest_iteration = tolerance, largest_iteration

    def solve(self, right: Tensor) -> Solution:
        """x with S_i x = b for every row of b, [B, P]."""
        block, everyone = self.block, torch.arange(len(right), device=right.device)
        kept = right @ block.basis
        first = self._within(kept, self.tolerance)
        inside = first.vectors @ block.basis.mT
        known = right + self.own(inside, everyone)
        known = known - (known @ block.basis) @ block.basis.mT
        beyond = (known - first.vectors @ block.outside.mT) / block.rest
        back = self.own(beyond, everyone) @ block.basis - beyond @ block.outside
        second = self._within(back, CORRECTION)
        return replace(
            first,
            vectors=inside + second.vectors @ block.basis.mT + beyond,
            indefinite=first.indefinite | second.indefinite,
            iterations=first.iterations + second.iterations,
        )

    def _within(self, right: Tensor, tolerance: float) -> Solution:
        """A_i y = b, in coordinates of the kept directions."""
        basis, inside = self.block.basis, self.block.inside

        def times(vectors: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
            return whole - self.own(vectors @ basis.mT, rows) @ basis

        return conjugate_gradients(
            times, lambda rows: rows / inside, right, tolerance, self.largest_iteration
        )
