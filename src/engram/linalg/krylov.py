r"""Krylov spaces: a symmetric matrix explored along a growing basis, by products with it alone.

:class:`BlockKrylov` grows by blocks: by what the matrix makes of the last block, which finds the
directions with the most curvature first, or by directions that are given.

:func:`ritz_values` is Lanczos' method, for the ends of a spectrum: for symmetric A and
positive-definite M the eigenvalues of :math:`M^{-1} A` are those of a tridiagonal matrix in a basis
that is orthonormal in the inner product of M and grows by a product with A a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engram.core.dtypes import eigh
from engram.core.progress import Bar

Apply = Callable[[Tensor], Tensor]

# From where on what is new is rounding
NOTHING_NEW = 1e-6  # share of a direction outside the basis; with less it is dropped
BREAKDOWN = 1e-10  # length of a new vector over the largest curvature; with less the space is whole

WIDTH = 64  # given directions taken in at a time: enough for efficient products, little memory


class BlockKrylov:
    """Orthonormal rows and what a matrix makes of them.

    Args:
        multiply: M v for rows [A, P].
        like: rows of the same length, type and device.
        capacity: at most so many directions.
        progress: show a bar when it takes longer than a few seconds.
    """

    def __init__(self, multiply: Apply, like: Tensor, capacity: int, progress: bool) -> None:
        self.multiply = multiply
        self.count = 0
        capacity = min(capacity, like.shape[1])
        self._rows = like.new_empty(capacity, like.shape[1])
        self._images = torch.empty_like(self._rows)
        self.bar = Bar(capacity, "curvature", progress)

    @property
    def room(self) -> int:
        """How many directions can still be taken in."""
        return len(self._rows) - self.count

    @property
    def rows(self) -> Tensor:
        """The basis, [r, P]."""
        return self._rows[: self.count]

    def beyond(self, directions: Tensor) -> Tensor:
        """What of some rows is outside the basis."""
        return directions - (directions @ self.rows.mT) @ self.rows

    def add(self, directions: Tensor) -> Tensor:
        """Take directions [A, P] into the basis; the images of what was new."""
        start = self.count
        for part in directions.split(WIDTH):
            new = self._orthonormal(part)[: self.room]
            if len(new) == 0:
                continue
            images = self.multiply(new)
            self._rows[self.count : self.count + len(new)] = new
            self._images[self.count : self.count + len(new)] = images
            self.count += len(new)
            self.bar.update(len(new))
        return self._images[start : self.count]

    def krylov(self, start: Tensor, count: int) -> None:
        """Blocks M^j times the rows of ``start``, until there are ``count`` directions."""
        block = start
        while self.count < min(count, len(self._rows)):
            block = self.add(block)
            if len(block) == 0:
                return

    def _orthonormal(self, directions: Tensor) -> Tensor:
        """Orthonormal rows for what is outside the basis."""
        norms = directions.norm(dim=1, keepdim=True)
        rows = directions[norms[:, 0] > 0] / norms[norms[:, 0] > 0]
        rows = self.beyond(rows)
        rows = rows[rows.norm(dim=1) > NOTHING_NEW]
        if len(rows) == 0:
            return rows
        values, vectors = eigh(rows @ rows.mT)
        good = values > NOTHING_NEW**2 * values[-1]
        turn = (vectors[:, good] * values[good].rsqrt()).mT.to(rows.dtype)
        # a second time, for what rounding left of the basis
        return torch.linalg.qr(self.beyond(turn @ rows).mT)[0].mT

    def lowest(self) -> float:
        """The smallest eigenvalue within the basis: the matrix has one as small, or smaller."""
        inside = self.rows @ self._images[: self.count].mT
        return float(eigh(0.5 * (inside + inside.mT))[0][0])

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues [r] within the basis, their vectors U [P, r], and M U outside it [P, r]."""
        self.bar.close()
        inside = self.rows @ self._images[: self.count].mT
        values, turn = eigh(0.5 * (inside + inside.mT))
        turn = turn.to(inside.dtype)
        basis = self.rows.mT @ turn
        outside = self._images[: self.count].mT @ turn - basis * values.to(turn)
        return values.to(inside.dtype), basis, outside


def ritz_values(
    times: Apply, multiply: Apply, solve: Apply, start: Tensor, steps: Iterable[int]
) -> Tensor:
    """Estimates of the eigenvalues of M^-1 A, ascending; the true ends lie at these or further out.

    Args:
        times: A v for a vector [P].
        multiply, solve: M v and M^-1 v.
        start: the first vector, [P].
        steps: one product with A each, at most; behind a progress bar, say.

    Example:
        >>> values = torch.tensor([-1.0, 2.0, 5.0], dtype=torch.float64)
        >>> start = torch.ones(3, dtype=torch.float64)
        >>> ritz_values(lambda v: values * v, torch.clone, torch.clone, start, range(9))
        tensor([-1.,  2.,  5.], dtype=torch.float64)
    """
    vector = start
    basis: list[Tensor] = []
    images: list[Tensor] = []  # M times the basis
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in steps:
        image = multiply(vector)
        length = math.sqrt(max(float(vector @ image), 0.0))
        if basis:
            if length <= BREAKDOWN * max(map(abs, diagonal)):
                break
            beside.append(length)
        basis.append(vector / length)
        images.append(image / length)
        product = times(basis[-1])
        diagonal.append(float(basis[-1] @ product))
        vector = solve(product)
        for _ in range(2):  # rounding takes orthogonality away
            known, weighted = torch.stack(basis), torch.stack(images)
            vector = vector - (weighted @ vector) @ known
        if len(basis) == len(start):
            break
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    outer = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
    return torch.linalg.eigvalsh(matrix + outer + outer.T)
