r"""Gradients of a matrix at several positions, in eigenbases of its rows and columns.

For :math:`G = \sum_t r_t c_t'` the step is :math:`Q_r \big(D \circ (Q_r' G Q_c)\big) Q_c'`. Each
rotation can be made on the vectors or on the matrix G: on the vectors it costs a product per
position, on the matrix one per row or column there and one back. Whichever is smaller is taken, so
the cost never depends on how many positions a layer has alone. Where eigenvalues are merged there
are two more ways, of :mod:`engram.linalg.clustered`. At one position all that counts is the gain
:math:`D (Q_c' c)^2` of each row, for which D can be replaced by factors of its numerical rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.dtypes import in_double
from engram.linalg.block import LARGEST_RANK, SMALLEST_SIDE
from engram.linalg.clustered import ClusteredSpectrum, rotated
from engram.linalg.columns import Columns

# Singular values of a table of gains over the largest: smaller ones are rounding and left out
NUMERICAL_RANK = {torch.float64: 1e-14, torch.float32: 1e-7}

Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Eigenbases:
    """A covariance that is diagonal in eigenbases of rows and columns.

    Args:
        rows, columns: the eigenvectors, [O, O] and [I, I]; None for rows stands for the identity.
        covariance: D, [O, I].
        with_bias: whether the last column is that of a bias; the columns that are passed do not
            have its constant 1.
        clusters: the covariance by kept and merged directions, where some are merged.
    """

    rows: Tensor | None
    columns: Tensor
    covariance: Tensor
    with_bias: bool
    clusters: ClusteredSpectrum | None = None

    def perturbations(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """(S^-1 G) c_t for rows [B, T, O] and columns [B, T, I], and the sum of all G.

        By the way with the fewest multiplications; None for the sum where no G is built.
        """
        return self._way(columns.shape[1])(rows, columns)

    def _way(self, positions: int) -> Way:
        clusters = self.clusters
        if clusters is None:
            return self._in_basis
        outputs, inputs = self.covariance.shape
        through = 2 * positions * outputs * inputs  # of making G, and of its way back
        turns = inputs**2 * min(positions, 2 * outputs) + 2 * outputs**2 * min(positions, inputs)
        multiplications: dict[Way, int] = {
            self._in_basis: through + turns,
            self._by_positions: clusters.products_by_positions(positions),
            self._by_matrix: through + clusters.products_by_matrix(),
        }
        return min(multiplications, key=multiplications.__getitem__)

    def _by_positions(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, None]:
        assert self.clusters is not None
        return self.clusters.position_perturbations(rows, columns), None

    def _by_matrix(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        assert self.clusters is not None
        matrix = self.gradients(rows, columns)
        return self.through(columns, self.clusters.step(matrix)), matrix.sum(0)

    def _in_basis(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.seen(columns, 2)
        matrix = self.coordinates(rows, seen)
        summed = self._turned_back(matrix.sum(0).mT).mT @ self.columns.mT
        matrix *= self.covariance
        return self.outputs(matrix, seen), summed

    def seen(self, columns: Tensor, uses: int) -> Columns:
        """Columns [B, T, I], turned where that is shorter than turning matrices so many times."""
        turn = columns.shape[1] < uses * len(self.covariance)
        return Columns(columns, rotated(columns, self.columns) if turn else None)

    def coordinates(self, rows: Tensor, columns: Columns) -> Tensor:
        """Q_r' G Q_c of every example, [B, O, I], for rows [B, T, O]."""
        turn_rows = columns.positions < self.covariance.shape[1]
        rows = self._turned(rows) if turn_rows else rows
        if columns.turned is not None:
            matrix = torch.bmm(rows.mT, columns.turned)
        else:
            matrix = self.gradients(rows, columns.plain) @ self.columns
        return matrix if turn_rows else self._turned(matrix.mT).mT

    def outputs(self, matrix: Tensor, columns: Columns) -> Tensor:
        """Q_r X Q_c' c_t, [B, T, O], for matrices X [B, O, I] in the basis."""
        turn_rows = columns.positions < self.covariance.shape[1]
        matrix = matrix if turn_rows else self._turned_back(matrix.mT).mT
        if columns.turned is not None:
            found = torch.bmm(columns.turned, matrix.mT)
        else:
            found = self.through(columns.plain, matrix @ self.columns.mT)
        return self._turned_back(found) if turn_rows else found

    def _turned(self, rows: Tensor) -> Tensor:
        """Q_r' r for [..., O]."""
        return rows if self.rows is None else rows @ self.rows

    def _turned_back(self, rows: Tensor) -> Tensor:
        """Q_r r for [..., O]."""
        return rows if self.rows is None else rows @ self.rows.mT

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<G_r, S^-1 G_s>, [B, R, R], for rows [B, R, T, O] and columns [B, T, I].

        The columns are rotated once for all R vectors.
        """
        positions, inputs = columns.shape[1:]
        count, outputs = rows.shape[1], rows.shape[3]
        turn_columns, turn_rows = positions < count * outputs, positions < inputs
        rows = self._turned(rows) if turn_rows else rows
        stacked = rows.transpose(1, 2).flatten(2)  # [B, T, R * O]: one product for all vectors
        if turn_columns:
            matrix = torch.bmm(stacked.mT, rotated(columns, self.columns))
        else:
            matrix = self.gradients(stacked, columns) @ self.columns
        matrix = matrix.unflatten(1, (count, -1))
        matrix = matrix if turn_rows else self._turned(matrix.mT).mT
        turned = matrix.flatten(2)
        return turned @ (turned * self.covariance.flatten()).mT

    def gradients(self, rows: Tensor, columns: Tensor) -> Tensor:
        """G of every example, [B, O, I], with the bias's column where it belongs to them."""
        matrix = torch.bmm(rows.mT, columns)
        if not self.with_bias:
            return matrix
        return torch.cat([matrix, rows.sum(1)[:, :, None]], dim=2)

    def through(self, columns: Tensor, matrix: Tensor) -> Tensor:
        """Matrices [B, O, I] times the columns, [B, T, O]."""
        if not self.with_bias:
            return torch.bmm(matrix, columns.mT).mT
        product = torch.bmm(matrix[:, :, :-1], columns.mT)
        return (product + matrix[:, :, -1:]).mT


def gain_factors(precision: Tensor) -> tuple[Tensor, Tensor] | None:
    """Factors [O, m], [I, m] of the covariances where their numerical rank m is small.

    Eigenvalues ``a_i b_j + delta`` have reciprocals of rank about 20 to single precision,
    whatever the layer's size. Entries are weighted by their share in a typical gain, so that
    small covariances in front of large inputs keep their relative accuracy.

    Args:
        precision: the eigenvalues, [O, I].
    """
    if min(precision.shape) < SMALLEST_SIDE:
        return None
    covariance = in_double(precision.reciprocal())
    typical = in_double(precision).mean(0)
    gain = covariance @ typical
    share = covariance * typical / gain[:, None]
    u, singular, v = torch.linalg.svd(share, full_matrices=False)
    smallest = NUMERICAL_RANK.get(precision.dtype, NUMERICAL_RANK[torch.float32])
    rank = int((singular > smallest * singular[0]).sum())
    if rank > LARGEST_RANK * min(covariance.shape):
        return None
    left = gain[:, None] * u[:, :rank] * singular[:rank]
    right = v[:rank].mT / typical[:, None]
    return left.to(precision), right.to(precision)
