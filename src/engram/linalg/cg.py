r"""Conjugate gradients for many systems at once, each with its own right-hand side.

.. math:: A_m x_m = b_m

All systems share the passes over the data; one that has converged is set aside, so that the others
get cheaper. A is self-adjoint either as it stands, and then the systems may be preconditioned, or
in an inner product :math:`\langle u, L v \rangle` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.dtypes import wide

#: rows v [R, P] -> [R, P]
Apply = Callable[[Tensor], Tensor]
#: vectors v [R, P] of the systems numbered [R] -> [R, P]
ApplyTo = Callable[[Tensor, Tensor], Tensor]
#: vectors v [R, P] of the systems numbered [R], and what comes for free: M v for the matrix M whose
#: inverse is the preconditioner, or L v in the inner product of L -> A v [R, P]
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Limits:
    """Where the iterations end.

    Args:
        tolerance: relative residual at which a system counts as solved.
        iterations: at most so many products per system.
        smallest_curvature: <v, A v> over <v, v> that a system must exceed in every direction that
            is met; one that does not is flagged, and stays where it is.
        after_each: called after each iteration, to show progress.
    """

    tolerance: float
    iterations: int
    smallest_curvature: float = 0.0
    after_each: Callable[[], None] | None = None


@dataclass(frozen=True)
class Solution:
    """Solutions of M systems with P unknowns.

    Args:
        vectors: x, [M, P]; where a system is not positive definite, the last one before that
        residual: norm of b - A x over that of b, both in the metric of the preconditioner or of L,
            [M].
        indefinite: where a direction of too little curvature was met, [M].
        iterations: products that each system took, [M].
    """

    vectors: Tensor
    residual: Tensor
    indefinite: Tensor
    iterations: Tensor


def conjugate_gradients(
    times: Operator,
    right: Tensor,
    limits: Limits,
    precondition: Apply | None = None,
    weigh: ApplyTo | None = None,
) -> Solution:
    """Solve A_m x_m = b_m.

    Args:
        times: multiplies with A; it is also told which systems the vectors belong to, and what
            comes for free of them.
        right: b, [M, P].
        limits: where it ends.
        precondition: applies an approximate inverse of A, symmetric and positive definite.
        weigh: multiplies with L, positive semi-definite, where A is self-adjoint in <u, L v>; then
            there is no preconditioner.

    Example:
        >>> matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        >>> right = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> found = conjugate_gradients(lambda v, *_: v @ matrix, right, Limits(1e-12, 10))
        >>> bool(torch.allclose(found.vectors @ matrix, right)), int(found.iterations)
        (True, 2)
    """

    def with_dual(residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The residual among the directions, and its dual, whose inner product is its square."""
        if weigh is not None:
            return residual, weigh(residual, rows)
        return (residual if precondition is None else precondition(residual)), residual

    solution, residual = torch.zeros_like(right), right.clone()
    primal, dual = with_dual(residual, torch.arange(len(right), device=right.device))
    direction, weighted = primal.clone(), dual.clone()
    square = _inner(primal, dual)
    start = square.clone()
    indefinite = torch.zeros_like(square, dtype=torch.bool)
    iterations = torch.zeros_like(square, dtype=torch.long)
    for _ in range(limits.iterations):
        rows = ((square > limits.tolerance**2 * start) & ~indefinite).nonzero()[:, 0]
        if len(rows) == 0:
            break
        image = times(direction[rows], rows, weighted[rows])
        iterations[rows] += 1
        along = direction[rows] if weigh is None else weighted[rows]
        curvature = _inner(along, image)
        smallest = limits.smallest_curvature
        enough = curvature > (smallest * _inner(along, direction[rows]) if smallest else 0)
        indefinite[rows[~enough]] = True  # for NaN too
        rows, image, curvature = rows[enough], image[enough], curvature[enough]
        step = (square[rows] / curvature).to(right)[:, None]
        solution[rows] += step * direction[rows]
        residual[rows] -= step * image
        primal, dual = with_dual(residual[rows], rows)
        before = square[rows]
        square[rows] = _inner(primal, dual)
        ratio = (square[rows] / before).to(right)[:, None]
        direction[rows] = primal + ratio * direction[rows]
        weighted[rows] = dual + ratio * weighted[rows]
        if limits.after_each is not None:
            limits.after_each()
    share = (square / start.clamp_min(torch.finfo(start.dtype).tiny)).clamp_min(0).sqrt()
    return Solution(solution, share, indefinite, iterations)


def for_some(product: Apply, like: Tensor) -> ApplyTo:
    """A product that is made for all systems at once, for some of them: the others get zeros.

    Args:
        product: [M, P] -> [M, P], each row with the matrix of its own system.
        like: all rows, [M, P].
    """

    def some(vectors: Tensor, rows: Tensor) -> Tensor:
        everyone = torch.zeros_like(like)
        everyone[rows] = vectors
        return product(everyone)[rows]

    return some


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Row by row, in the widest precision."""
    return (wide(left) * wide(right)).sum(1)
