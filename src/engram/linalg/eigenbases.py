r"""Gradients of a matrix at several positions, in eigenbases of its rows and columns.

For :math:`G = \sum_t r_t c_t'` the step is :math:`Q_r \big(D \circ (Q_r' G Q_c)\big) Q_c'`. Each
rotation can be made on the vectors or on the matrix G: on the vectors it costs a product per
position, on the matrix one per row or column there and one back. Whichever is smaller is taken, so
the cost never depends on how many positions a layer has alone. Where eigenvalues are merged there
are two more ways, of :mod:`engram.linalg.clustered`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rotated(columns: Tensor, basis: Tensor) -> Tensor:
    """Q' c for [..., I] and a basis Q [I, q], a constant 1 appended where the columns lack it."""
    if columns.shape[-1] == basis.shape[0]:
        return columns @ basis
    flat = columns.reshape(-1, columns.shape[-1])
    return torch.addmm(basis[-1], flat, basis[:-1]).unflatten(0, columns.shape[:-1])


@dataclass(frozen=True)
class Eigenbases:
    """A covariance that is diagonal in eigenbases of rows and columns.

    Args:
        rows, columns: the eigenvectors, [O, O] and [I, I].
        covariance: D, [O, I].
        with_bias: whether the last column is that of a bias; the columns that are passed do not
            have its constant 1.
    """

    rows: Tensor
    columns: Tensor
    covariance: Tensor
    with_bias: bool

    def there_and_back(self, positions: int) -> int:
        """Multiplications per example that G and its way back through the layer take."""
        return 2 * positions * self.covariance.numel()

    def multiplications(self, positions: int) -> int:
        """Multiplications per example of :meth:`moves`."""
        outputs, inputs = self.covariance.shape
        turns = inputs**2 * min(positions, 2 * outputs) + 2 * outputs**2 * min(positions, inputs)
        return self.there_and_back(positions) + turns

    def moves(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(S^-1 G) c_t for rows [B, T, O] and columns [B, T, I], and the sum of all Q_r' G Q_c."""
        positions, inputs = columns.shape[1:]
        turn_columns, turn_rows = positions < 2 * rows.shape[2], positions < inputs
        rows = rows @ self.rows if turn_rows else rows
        columns = rotated(columns, self.columns) if turn_columns else columns
        if turn_columns:
            matrix = torch.bmm(rows.mT, columns)
        else:
            matrix = self.gradients(rows, columns) @ self.columns
        if not turn_rows:
            matrix = self.rows.mT @ matrix
        summed = matrix.sum(0)
        matrix *= self.covariance
        if not turn_rows:
            matrix = self.rows @ matrix
        if turn_columns:
            moved = torch.bmm(columns, matrix.mT)
        else:
            moved = self.through(columns, matrix @ self.columns.mT)
        return (moved @ self.rows.mT if turn_rows else moved), summed

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<G_r, S^-1 G_s>, [B, R, R], for rows [B, R, T, O] and columns [B, T, I].

        The columns are rotated once for all R vectors.
        """
        positions, inputs = columns.shape[1:]
        count, outputs = rows.shape[1], rows.shape[3]
        turn_columns, turn_rows = positions < count * outputs, positions < inputs
        rows = rows @ self.rows if turn_rows else rows
        stacked = rows.transpose(1, 2).flatten(2)  # [B, T, R * O]: one product for all vectors
        if turn_columns:
            matrix = torch.bmm(stacked.mT, rotated(columns, self.columns))
        else:
            matrix = self.gradients(stacked, columns) @ self.columns
        matrix = matrix.unflatten(1, (count, -1))
        matrix = matrix if turn_rows else self.rows.mT @ matrix
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
