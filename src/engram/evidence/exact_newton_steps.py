r"""A second opinion on some examples: the step of the exact Hessian of the remaining data.

.. math:: (H - H_i)\, \delta_i = \nabla \ell_i

A few conjugate-gradient rounds preconditioned with S, which gives the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.progress import progress_over
from engram.evidence.objective import Objective

TOLERANCE = 1e-3  # of the residual, in the norm of S^-1


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of the parameters for n examples, [n, P].

    Args:
        first: S^-1 g, the posterior's own.
        second: after the rounds of conjugate gradients.
        residual: what the first step leaves of H step = g, relative, [n].
        negative: where a direction of negative curvature was met, [n].
    """

    first: Tensor
    second: Tensor
    residual: Tensor
    negative: Tensor


def second_steps(objective: Objective, indices: Tensor, rounds: int, progress: bool) -> Steps:
    """Both steps of these examples; each round is one product with the Hessian per example."""
    gradient = objective.gradients(indices)
    first = objective.solve(gradient)
    solution, residual = torch.zeros_like(first), gradient.clone()
    conditioned, direction = first, first.clone()
    square = start = _inner(residual, conditioned)
    negative = torch.zeros(len(indices), dtype=torch.bool, device=first.device)
    left = torch.full_like(square, torch.nan)
    for number in progress_over(range(rounds), "second opinion", progress):
        whole = objective.hessian_times(direction)
        if number == 0:
            off = gradient - whole
            left = (_inner(off, objective.solve(off)) / start).clamp(min=0).sqrt()
        image = whole - _own_times(objective, indices, direction)
        curvature = _inner(direction, image)
        active = (square > TOLERANCE**2 * start) & ~negative
        negative |= active & (curvature <= 0)
        active &= ~negative
        if not active.any():
            break
        step = torch.where(active, square / curvature, torch.zeros_like(square))[:, None]
        solution, residual = solution + step * direction, residual - step * image
        conditioned = objective.solve(residual)
        before, square = square, _inner(residual, conditioned)
        ratio = torch.where(active, square / before, torch.zeros_like(square))[:, None]
        direction = conditioned + ratio * direction
    untouched = (solution == 0).all(1, keepdim=True)
    return Steps(first, torch.where(untouched, first, solution), left, negative)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(1)


def _own_times(objective: Objective, indices: Tensor, vectors: Tensor) -> Tensor:
    """H_i v of each example with its own vector, [n, P]."""
    rows = [objective.own_hessian_times(int(i), v) for i, v in zip(indices, vectors, strict=True)]
    return torch.stack(rows)
