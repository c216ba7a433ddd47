r"""What a copy's own steps say about its curvature: pairs (s, y = H s) around a base that is known.

.. math:: B^{-1} = \gamma B_0^{-1} +
    \begin{pmatrix} S & \gamma Z \end{pmatrix}
    \begin{pmatrix} R^{-\top} (D + \gamma W) R^{-1} & -R^{-\top} \\ -R^{-1} & 0 \end{pmatrix}
    \begin{pmatrix} S' \\ \gamma Z' \end{pmatrix}

with the steps S and :math:`Z = B_0^{-1} Y` of the last pairs, R the upper triangle of S'Y in the
order of time, D its diagonal and W = Y'Z: limited-memory BFGS in its compact form, a few products
with matrices. The base is linear, so Z is the difference of what it makes of gradients, and a step
takes one product with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.dtypes import wide, widest

Apply = Callable[[Tensor], Tensor]
# Pairs of a step s and the change y of the gradient along it
CURVED = 1e-8  # s'y over |s| |y|; a pair with less is rounding, or not convex, and is left out
MEMORY = 20  # pairs kept; each takes the memory of two vectors of a copy


@dataclass(frozen=True)
class Base:
    """An inverse Hessian that copies start from, linear and symmetric.

    Args:
        apply: to rows [A, P]; each copy's pairs scale it.
        known: without any curvature at all (False) the first step is no longer than 1.
        memory: pairs that its size is taken from.
    """

    apply: Apply
    known: bool = True
    memory: int = MEMORY


IDENTITY = Base(torch.clone, known=False, memory=1)


class LBFGSMemory:
    """The last pairs of each copy: limited-memory BFGS on top of any inverse Hessian.

    Args:
        start: parameters of the copies, [C, P].
        depth: pairs kept.
    """

    def __init__(self, start: Tensor, depth: int) -> None:
        copies, size = start.shape
        self.depth, self.count = depth, 0
        self.steps = start.new_zeros(copies, depth, size)  # S
        self.solved = torch.zeros_like(self.steps)  # Z
        square = copies, depth, depth
        self.curvature = torch.zeros(square, dtype=widest(start.device), device=start.device)
        self.energy = torch.zeros_like(self.curvature)  # W
        self.curvature.diagonal(dim1=1, dim2=2).fill_(1.0)  # of pairs that do not count
        self.valid = torch.zeros(copies, depth, dtype=torch.bool, device=start.device)

    @property
    def _order(self) -> list[int]:
        """Places of the pairs, the oldest first."""
        kept = min(self.count, self.depth)
        return [number % self.depth for number in range(self.count - kept, self.count)]

    def add(self, rows: Tensor, step: Tensor, change: Tensor, solved: Tensor) -> None:
        """A pair of the copies ``rows``; without positive curvature it counts as none.

        Args:
            rows: which copies; the others have no pair at this place.
            step: s, [A, P].
            change: y, [A, P].
            solved: what the base makes of y, [A, P].
        """
        place = self.count % self.depth
        self.count += 1
        self._forget(place)
        product, square = wide(step * change).sum(1), wide(change * solved).sum(1)
        long = wide(step).norm(dim=1) * wide(change).norm(dim=1)
        good = (product > CURVED * long) & (square > 0)
        rows, step, change, solved = rows[good], step[good], change[good], solved[good]
        self.valid[rows, place] = True
        self.steps[rows, place], self.solved[rows, place] = step, solved
        self.curvature[rows, :, place] = _inner(self._of(self.steps, rows), change)
        energy = _inner(self._of(self.solved, rows), change)
        self.energy[rows, :, place], self.energy[rows, place] = energy, energy

    def _forget(self, place: int) -> None:
        self.valid[:, place] = False
        self.steps[:, place], self.solved[:, place] = 0.0, 0.0
        for small in (self.curvature, self.energy):
            small[:, place], small[:, :, place] = 0.0, 0.0
        self.curvature[:, place, place] = 1.0

    def scale(self, rows: Tensor, memory: int, otherwise: Tensor) -> Tensor:
        """The base's size: geometric mean of s'y / y'B0^-1 y over a copy's last good pairs, [A]."""
        order = self._order
        if not order:
            return otherwise
        valid = self.valid[rows][:, order]
        valid &= valid.flip(1).cumsum(1).flip(1) <= memory
        products, squares = (
            torch.where(valid, small.diagonal(dim1=1, dim2=2)[rows][:, order], 1.0).log().sum(1)
            for small in (self.curvature, self.energy)
        )
        count = valid.sum(1)
        mean = ((products - squares) / count.clamp_min(1)).exp()
        return torch.where(count > 0, mean.to(otherwise), otherwise)

    def apply(self, rows: Tensor, vectors: Tensor, solved: Tensor, scale: Tensor) -> Tensor:
        """B^-1 v for the copies ``rows``, [A, P].

        Args:
            rows: which copies.
            vectors: v, [A, P].
            solved: what the base makes of them, [A, P].
            scale: gamma, [A].
        """
        order = self._order
        steps, own = self._of(self.steps, rows), self._of(self.solved, rows)
        curvature = self.curvature[rows][:, order][:, :, order].triu()  # R
        energy = self.energy[rows][:, order][:, :, order]
        size = wide(scale)[:, None]
        back = _solve(curvature, _inner(steps, vectors)[:, order], upper=True)
        ahead = curvature.diagonal(dim1=1, dim2=2) * back
        ahead += size * ((energy @ back[:, :, None])[:, :, 0] - _inner(own, vectors)[:, order])
        ahead = _solve(curvature.mT, ahead, upper=False)
        result = scale[:, None] * solved
        result += _combined(steps, ahead, order)
        result -= _combined(own, size * back, order)
        return result

    def _of(self, part: Tensor, rows: Tensor) -> Tensor:
        """Of these copies; not copied where they are all."""
        return part if len(rows) == len(part) else part[rows]


def _inner(vectors: Tensor, row: Tensor) -> Tensor:
    """Inner products of vectors [A, M, P] with one row each, [A, P]."""
    return wide((vectors @ row[:, :, None])[:, :, 0])


def _combined(vectors: Tensor, weights: Tensor, order: list[int]) -> Tensor:
    """Sums of vectors [A, M, P] with weights [A, m] at some of their places, [A, P]."""
    full = vectors.new_zeros(vectors.shape[:2])
    full[:, order] = weights.to(full)
    return (full[:, None] @ vectors)[:, 0]


def _solve(triangle: Tensor, right: Tensor, upper: bool) -> Tensor:
    """T^-1 b for each copy's triangle T [A, m, m] and b [A, m]."""
    return torch.linalg.solve_triangular(triangle, right[:, :, None], upper=upper)[:, :, 0]
