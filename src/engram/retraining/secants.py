"""What a copy's own steps say about its curvature: pairs (s, y = H s)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Base:
    """An inverse Hessian that copies start from.

    Args:
        apply: to rows [A, P]; each copy's last pair scales it.
        known: without any curvature at all (False) the first step is no longer than 1.
    """

    apply: Apply
    known: bool = True


IDENTITY = Base(torch.clone, known=False)


class OwnPairs:
    """The last pairs of each copy: limited-memory BFGS on top of any inverse Hessian.

    Args:
        start: parameters of the copies, [C, P].
        depth: pairs kept.
    """

    def __init__(self, start: Tensor, depth: int) -> None:
        copies = len(start)
        self.depth = depth
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.copies = copies
        self.scale = start.new_zeros(copies)  # of the base for each copy; 0 while unknown

    def add(self, rows: Tensor, steps: Tensor, changes: Tensor) -> None:
        """Pairs of the copies ``rows``; a pair without positive curvature counts as none."""
        product = (steps * changes).sum(1)
        norms = steps.norm(dim=1) * changes.norm(dim=1)
        good = product > 1e-8 * norms
        inverse = torch.where(good, 1.0 / torch.where(good, product, 1.0), 0.0)
        full_steps = steps.new_zeros(self.copies, steps.shape[1])
        full_changes, full_inverse = torch.zeros_like(full_steps), steps.new_zeros(self.copies)
        full_steps[rows], full_changes[rows], full_inverse[rows] = steps, changes, inverse
        self.pairs = [*self.pairs[-self.depth + 1 :], (full_steps, full_changes, full_inverse)]

    def rescale(self, rows: Tensor, base: Apply) -> None:
        """Let the last pair of these copies set the size of the base, s'y / y'B0^-1 y."""
        steps, changes, inverse = (part[rows] for part in self.pairs[-1])
        product, squares = (steps * changes).sum(1), (changes * base(changes)).sum(1)
        good = (inverse > 0) & (squares > 0)
        ratio = product / torch.where(good, squares, 1.0)
        self.scale[rows] = torch.where(good, ratio, self.scale[rows])

    def apply(self, rows: Tensor, vectors: Tensor, base: Apply) -> Tensor:
        """The two-loop recursion around ``base`` for the copies ``rows``, [A, P]."""
        result, weights = vectors.clone(), []
        picked = [(s[rows], y[rows], r[rows]) for s, y, r in self.pairs]
        for step, change, inverse in reversed(picked):
            weight = inverse * (step * result).sum(1)
            result -= weight[:, None] * change
            weights.append(weight)
        result = base(result)
        for (step, change, inverse), weight in zip(picked, reversed(weights), strict=True):
            result += (weight - inverse * (change * result).sum(1))[:, None] * step
        return result
