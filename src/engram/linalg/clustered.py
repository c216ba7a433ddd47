r"""Eigenvalues of a Kronecker-factored block that act alike, merged so that a pass need not
tell their directions apart.

Most directions of a wide layer are nearly empty: there the covariance is almost that of the prior,
whatever the direction. With the tail of the row and of the column directions merged, the table of
covariances :math:`D_{jc}` is

.. math:: D_{jc} = \beta + u_j + w_c + M_{jc}

with u, w and M zero outside the few directions that are kept. For a gradient :math:`G = r c'` at
one position this needs :math:`Q_k' r`, :math:`Q_k' c` and lengths, and no rotation of the whole.
At several positions, with rows R [T, O], columns C [T, I], and :math:`\tilde R = R Q_r`,
:math:`\tilde C = C Q_c` in the kept directions, :math:`(S^{-1} R' C) C'` is, transposed,

.. math::

    \big(\beta C C' + \tilde C w \tilde C'\big) R
    + \big(C C' \tilde R u + \tilde C (M \circ \tilde R' \tilde C)'\big) Q_r' ,

which needs no matrix as large as the weight. That is short where there are few positions; where
there are many, the same step is made on the matrix :math:`G = R' C`.

A merged covariance is the mean of those it stands for, weighted by the curvature there, so that
the sum of all leverages stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.linalg.block import ANY_DIRECTION, SMALLEST_SIDE

# Share of the directions that may be kept: with more, the products with what is kept and with what
# is merged take longer together than one rotation of all
LARGEST_SHARE = 0.75


def rotated(columns: Tensor, basis: Tensor) -> Tensor:
    """Q' c for [..., I] and a basis Q [I, q], a constant 1 appended where the columns lack it."""
    if columns.shape[-1] == basis.shape[0]:
        return columns @ basis
    flat = columns.reshape(-1, columns.shape[-1])
    return torch.addmm(basis[-1], flat, basis[:-1]).unflatten(0, columns.shape[:-1])


@dataclass(frozen=True)
class ClusteredSpectrum:
    """The parts of a table of covariances with merged tails; None for a side that has no tail.

    Args:
        rows, columns: the kept eigenvectors, [O, p] and [I, q].
        base, by_row, by_column, both: beta, u [p], w [q] and M [p, q].
        merged_rows, merged_columns: whether a side has a tail; without one, beta and the other
            side's part are zero.
    """

    rows: Tensor
    columns: Tensor
    base: Tensor
    by_row: Tensor
    by_column: Tensor
    both: Tensor
    merged_rows: bool
    merged_columns: bool

    @classmethod
    def of(cls, covariance: Tensor, rows: Tensor, columns: Tensor) -> ClusteredSpectrum | None:
        """The parts of a table [O, I] whose last rows or columns are equal; None if they are not.

        Args:
            covariance: the table, the kept directions first.
            rows, columns: all eigenvectors, [O, O] and [I, I].
        """
        p, q = _num_distinct(covariance.mT), _num_distinct(covariance)
        outputs, inputs = covariance.shape
        if p == outputs and q == inputs:
            return None
        kept = covariance[:p, :q]
        by_row = covariance[:p, -1] if q < inputs else covariance.new_zeros(p)
        by_column = covariance[-1, :q] if p < outputs else covariance.new_zeros(q)
        both_merged = p < outputs and q < inputs
        base = covariance[-1, -1] if both_merged else covariance.new_zeros(())
        return cls(
            rows[:, :p].contiguous(),
            columns[:, :q].contiguous(),
            base,
            by_row - base,
            by_column - base,
            kept - by_row[:, None] - by_column + base,
            p < outputs,
            q < inputs,
        )

    def gains(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """For gradients r c': S^-1 (r c') c = g r + Q (h * Q' r); g [B, 1] and h [B, p] from c.

        A constant 1 of the bias need not be among the columns.
        """
        length = torch.linalg.vector_norm(columns, dim=1, keepdim=True).square()
        if columns.shape[1] < self.columns.shape[0]:
            length = length + 1
        squares = rotated(columns, self.columns).square()
        every = length * self.base + (squares @ self.by_column)[:, None]
        return every, torch.addmm(length * self.by_row, squares, self.both.mT)

    def rank_one_perturbation(self, rows: Tensor, every: Tensor, kept: Tensor) -> Tensor:
        """g r + Q (h * Q' r), [B, O], for rows [B, O] and gains g [B, 1] and h [B, p]."""
        found = (rows @ self.rows * kept) @ self.rows.mT
        return found.addcmul_(rows, every) if self.merged_rows else found

    def rank_one_products(self, rows: Tensor, every: Tensor, kept: Tensor) -> Tensor:
        """<r, g s + Q (h * Q' s)> for rows r and s of [B, R, O], as [B, R, R]."""
        turned = rows @ self.rows
        products = (turned * kept[:, None, :]) @ turned.mT
        return products + every[:, :, None] * (rows @ rows.mT)

    def step(self, matrix: Tensor) -> Tensor:
        """S^-1 G for matrices [..., O, I], the bias's column among them."""
        turned = self.rows.mT @ matrix
        step = self.both * (turned @ self.columns) @ self.columns.mT
        if self.merged_columns:
            step = step + self.by_row[:, None] * turned
        step = self.rows @ step
        if not self.merged_rows:
            return step
        step = step + (matrix @ self.columns * self.by_column) @ self.columns.mT
        return step.add_(self.base * matrix) if self.merged_columns else step

    def position_perturbations(self, rows: Tensor, columns: Tensor) -> Tensor:
        """From rows [B, T, O] and columns [B, T, I] the moves [B, T, O], by inner products.

        A constant 1 of the bias need not be among the columns.
        """
        constant = columns.shape[2] < self.columns.shape[0]
        seen, turned = rotated(columns, self.columns), rows @ self.rows
        inner = turned.mT @ seen
        kept = seen @ (self.both * inner).mT
        near = None
        if self.merged_columns:
            gram = columns @ columns.mT
            gram = gram + 1 if constant else gram
            kept = torch.baddbmm(kept, gram, turned * self.by_row)
            near = self.base * gram
        moved = kept @ self.rows.mT
        if not self.merged_rows:
            return moved
        by_columns = (seen * self.by_column) @ seen.mT
        return torch.baddbmm(moved, by_columns if near is None else near + by_columns, rows)

    def products_by_positions(self, positions: int) -> int:
        """Multiplications per example of :meth:`position_perturbations`."""
        outputs, p = self.rows.shape
        inputs, q = self.columns.shape
        gram = positions**2 * (inputs + p) if self.merged_columns else 0
        near = positions**2 * (outputs + q) if self.merged_rows else 0
        return positions * (2 * outputs * p + inputs * q + 2 * p * q) + gram + near

    def products_by_matrix(self) -> int:
        """Multiplications per example of :meth:`step`."""
        outputs, p = self.rows.shape
        inputs, q = self.columns.shape
        by_columns = 2 * outputs * inputs * q if self.merged_rows else 0
        return 2 * p * inputs * (outputs + q) + by_columns


def _num_distinct(table: Tensor) -> int:
    """How many columns come before those that equal the last one; all where merging is idle."""
    count = table.shape[1]
    differs = (table != table[:, -1:]).any(0).nonzero()
    kept = int(differs[-1]) + 1 if len(differs) else 0
    return kept if _pays(kept, count) else count


def _pays(kept: int, count: int) -> bool:
    return count >= SMALLEST_SIDE and kept <= LARGEST_SHARE * count


def merge(covariance: Tensor, energy: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Merge what can be within a tolerance; the new table, and the orders of rows and columns.

    Args:
        covariance: [O, I], the inverse eigenvalues.
        energy: [O, I], the data's part of the eigenvalues: how much curvature each direction has.
        tolerance: relative error allowed in how far an average example moves the model.

    Returns:
        The table with its rows and columns in their new order, and the two orders.
    """
    row_order = energy.sum(1).argsort(descending=True)
    column_order = energy.sum(0).argsort(descending=True)
    covariance = covariance[row_order][:, column_order]
    energy = energy[row_order][:, column_order]
    kept = _num_kept(covariance, energy, _column_errors(covariance, energy), tolerance)
    covariance, energy = _with_tail(covariance, energy, kept)
    kept_rows = _num_kept(covariance.mT, energy.mT, _row_errors(covariance, energy), tolerance)
    covariance = _with_tail(covariance.mT, energy.mT, kept_rows)[0].mT.clone()
    covariance[:, kept:] = covariance[:, -1:]  # equal to the last bit, as `of` expects
    return covariance, row_order, column_order


Errors = Callable[[int, Tensor], tuple[float, float]]


def _num_kept(covariance: Tensor, energy: Tensor, errors: Errors, tolerance: float) -> int:
    """How many columns keep their own values; all where merging does not pay."""
    count = covariance.shape[1]

    def fits(kept: int) -> bool:
        typical, any_direction = errors(kept, _tail_mean(covariance, energy, kept))
        return typical <= tolerance and any_direction <= ANY_DIRECTION * tolerance

    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low if _pays(low, count) else count


def _with_tail(covariance: Tensor, energy: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Both tables with the columns after the kept ones set to their mean."""
    tail = covariance.shape[1] - kept
    if tail == 0:
        return covariance, energy
    merged = _tail_mean(covariance, energy, kept)[:, None].expand(-1, tail)
    shared = energy[:, kept:].mean(1, keepdim=True).expand(-1, tail)
    return torch.cat([covariance[:, :kept], merged], 1), torch.cat([energy[:, :kept], shared], 1)


def _tail_mean(covariance: Tensor, energy: Tensor, kept: int) -> Tensor:
    """[O], the mean over the columns left, weighted by energy where there is any."""
    values, weights = covariance[:, kept:], energy[:, kept:]
    total = weights.sum(1)
    smallest = torch.finfo(total.dtype).tiny
    weighted = (values * weights).sum(1) / total.clamp(min=smallest)
    return torch.where(total > 0, weighted, values.mean(1))


def _column_errors(covariance: Tensor, energy: Tensor) -> Errors:
    """Of the gain sum_c D_jc c^2: for inputs as the data have them, and for one in no direction.

    The squares of inputs are taken to vary as those of a normal variable do: with twice the square
    of their mean.
    """
    gain = (covariance * energy).sum(1).square().sum()
    plain_gain = covariance.sum(1)

    def errors(kept: int, mean: Tensor) -> tuple[float, float]:
        change = covariance[:, kept:] - mean[:, None]
        typical = (2 * (change * energy[:, kept:]).square().sum() / gain).sqrt()
        return float(typical), float((change.sum(1).abs() / plain_gain).max())

    return errors


def _row_errors(covariance: Tensor, energy: Tensor) -> Errors:
    """Of the move Q (gain * Q' r): for gradients as the data have them, and for one of each."""
    inputs, rows = energy.mean(0), energy.sum(1)
    gain = covariance @ inputs
    size, plain_size = (gain.square() * rows).sum(), gain.square().sum()

    def errors(kept: int, mean: Tensor) -> tuple[float, float]:
        squares = (gain[kept:] - mean @ inputs).square()
        typical = ((squares * rows[kept:]).sum() / size).sqrt()
        return float(typical), float((squares.sum() / plain_size).sqrt())

    return errors
