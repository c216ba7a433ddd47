r"""Sums of outer products, :math:`\sum_t x_t x_t'`, gathered over many calls.

Only the blocks on and above the diagonal are computed. They are gathered in the precision of the
vectors for a few thousand of them and then added to a sum in double precision: adding a large
matrix in double precision after every call would cost as much as the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.dtypes import widest

# Ways of summing, each where it was measured to be the quicker one
LEAF = 200  # columns of a block; narrower ones are not worth splitting for half of the products
COPIED_WIDTH = 128  # columns; wider vectors with positions last are copied for one large product

# Vectors summed in their own precision before they are added to the total: more cost accuracy,
# fewer the time of adding a large matrix in double precision
GATHERED = 8192


class GramSum:
    """The sum of x x' over vectors [B, G, T, I], for each of G groups.

    Args:
        total: [G, I, I] in double precision, where the sum begins.
    """

    def __init__(self, total: Tensor | None = None) -> None:
        self._total = total
        self._recent: Tensor | None = None
        self._gathered = 0

    def add(self, vectors: Tensor) -> None:
        """Add the squares of vectors [B, G, T, I]."""
        batch, groups, positions, width = vectors.shape
        if self._recent is None:
            self._recent = vectors.new_zeros(groups, width, width)
        if groups > 1:
            flat = vectors.transpose(0, 1).flatten(1, 2)
            self._recent.baddbmm_(flat.mT, flat)
        # patches come with positions last; above this width a copy is cheaper than a product each
        elif positions == 1 or vectors.stride(-1) == 1 or width >= COPIED_WIDTH:
            _add_upper(self._recent[0], vectors.reshape(-1, width))
        else:
            self._recent += torch.bmm(vectors[:, 0].mT, vectors[:, 0]).sum(0, keepdim=True)
        self._gather(batch * positions)

    def add_square(self, square: Tensor, num_vectors: int) -> None:
        """Add the sum [I, I] over some vectors that was found in another way; one group."""
        if self._recent is None:
            self._recent = torch.zeros_like(square)[None]
        self._recent[0] += square
        self._gather(num_vectors)

    @property
    def matrix(self) -> Tensor | None:
        """The sum so far, [G, I, I] in double precision; None before the first call."""
        self._flush()
        if self._total is None:
            return None
        return torch.triu(self._total) + torch.triu(self._total, diagonal=1).mT

    def _gather(self, num_vectors: int) -> None:
        self._gathered += num_vectors
        if self._gathered >= GATHERED:
            self._flush()

    def _flush(self) -> None:
        if self._recent is None or self._gathered == 0:
            return
        if self._total is None:
            self._total = self._recent.to(widest(self._recent.device), copy=True)
        else:
            self._total += self._recent
        self._recent.zero_()
        self._gathered = 0


class SquareSum:
    """The diagonal of that sum, for vectors too long for a matrix.

    Example:
        >>> squares = SquareSum()
        >>> squares.add(torch.tensor([[[[1.0, 2.0], [3.0, 0.0]]]]))
        >>> squares.diagonal
        tensor([[10.,  4.]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.diagonal: Tensor | None = None

    def add(self, vectors: Tensor) -> None:
        """Add the squares of vectors [B, G, T, I], entry by entry."""
        found = vectors.square().sum((0, 2)).to(widest(vectors.device))
        self.diagonal = found if self.diagonal is None else self.diagonal + found


def _add_upper(total: Tensor, vectors: Tensor) -> None:
    """total += X' X on and above the diagonal; what is below is left undefined."""
    width = vectors.shape[1]
    if width <= LEAF:
        total.addmm_(vectors.mT, vectors)
        return
    half = width // 2
    left, right = vectors[:, :half], vectors[:, half:]
    total[:half, half:].addmm_(left.mT, right)
    _add_upper(total[:half, :half], left)
    _add_upper(total[half:, half:], right)
