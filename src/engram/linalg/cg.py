r"""Conjugate gradients for many systems at once, each with its own right-hand side.

.. math:: A_m x_m = b_m

All systems share the passes over the data; one that has converged is set aside, so that the others
get cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.dtypes import wide

#: vectors v [R, P] of the systems numbered [R], and M v for the matrix M whose inverse is the
#: preconditioner, which comes for free -> A v [R, P]
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Solution:
    """Solutions of M systems with P unknowns.

    Args:
        vectors: x, [M, P]; where a system is not positive definite, the last one before that
        residual: norm of b - A x over that of b, both in the preconditioner's metric, [M].
        indefinite: where a direction of no positive curvature was met, [M].
        iterations: products that each system took, [M].
    """

    vectors: Tensor
    residual: Tensor
    indefinite: Tensor
    iterations: Tensor


def conjugate_gradients(
    times: Operator,
    precondition: Callable[[Tensor], Tensor],
    right: Tensor,
    tolerance: float,
    largest_iteration: int,
) -> Solution:
    """Solve A_m x_m = b_m for symmetric A_m.

    Args:
        times: multiplies with A; it is also told which systems the vectors belong to, and what
            the preconditioner's matrix makes of them.
        precondition: applies an approximate inverse, [R, P] -> [R, P].
        right: b, [M, P].
        tolerance: relative residual at which a system counts as solved.
        largest_iteration: at most so many products per system.

    Example:
        >>> matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        >>> right = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> found = conjugate_gradients(lambda v, _, __: v @ matrix, torch.clone, right, 1e-12, 10)
        >>> bool(torch.allclose(found.vectors @ matrix, right)), int(found.iterations)
        (True, 2)
    """
    solution, residual = torch.zeros_like(right), right.clone()
    conditioned = precondition(residual)
    direction, weighted = conditioned.clone(), residual.clone()
    square = _inner(residual, conditioned)
    goal = tolerance**2 * square
    start = square.clone()
    indefinite = torch.zeros_like(square, dtype=torch.bool)
    iterations = torch.zeros_like(square, dtype=torch.long)
    for _ in range(largest_iteration):
        rows = ((square > goal) & ~indefinite).nonzero()[:, 0]
        if len(rows) == 0:
            break
        image = times(direction[rows], rows, weighted[rows])
        iterations[rows] += 1
        curvature = _inner(direction[rows], image)
        positive = curvature > 0  # false for NaN too
        indefinite[rows[~positive]] = True
        rows, image, curvature = rows[positive], image[positive], curvature[positive]
        step = (square[rows] / curvature).to(right)[:, None]
        solution[rows] += step * direction[rows]
        residual[rows] -= step * image
        conditioned = precondition(residual[rows])
        before = square[rows]
        square[rows] = _inner(residual[rows], conditioned)
        ratio = (square[rows] / before).to(right)[:, None]
        direction[rows] = conditioned + ratio * direction[rows]
        weighted[rows] = residual[rows] + ratio * weighted[rows]
    share = (square / start.clamp_min(torch.finfo(start.dtype).tiny)).clamp_min(0).sqrt()
    return Solution(solution, share, indefinite, iterations)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Row by row, in the widest precision."""
    return (wide(left) * wide(right)).sum(1)
