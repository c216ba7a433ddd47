r"""Sums of rows and columns of one weight matrix, and the Kronecker-factored precision from them.

With columns c (inputs, with a 1 for the bias) and rows r (output gradients) at M positions in all,

.. math:: S = \frac{1}{M} \Big(\sum r r'\Big) \otimes \Big(\sum c c'\Big) + \delta .
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.dtypes import eigh, wide
from engram.core.parameters import Layout
from engram.linalg.gram import GramSum, SquareSum
from engram.linalg.kronecker import KroneckerBlock

# Rows of a layer from which on their factor is its diagonal: a vocabulary's matrix takes gigabytes,
# and its eigenvectors hours
LONGEST_ROWS = 8192
# Of a layer that is so much wider than what it sees, as the head of a small language model, the
# same from 1,024 rows on: turning the rows takes that many times the layer's own products
WIDER = 8
WIDE_HEAD = 1024
# Rows of a factor from which on a model in single precision has its eigenvectors in that precision
# too: of 1,536 rows they take 0.46 s instead of 1.0, and the sum itself is no more exact
WIDE_ROWS = 512
# Rows of a factor from which on its eigenvectors take a minute and more on two cores: it is said
SLOW_EIGENVECTORS = 6000


@dataclass
class Factors:
    """Sums for one layer: rows [G, O, O], columns [G, I, I] (or token counts), positions M.

    Of more than 8,192 rows, and of more than 1,024 that are 8 times the columns, as in the head of
    a language model, the diagonal alone is summed.

    With a bias the columns have a constant 1 appended, whose products are ``column_sum`` and M.
    """

    layout: Layout
    rows: GramSum = field(default_factory=GramSum)
    row_squares: SquareSum = field(default_factory=SquareSum)
    columns: GramSum = field(default_factory=GramSum)
    column_sum: Tensor | None = None
    counts: Tensor | None = None
    positions: int | Tensor = 0  # a number for each group where they differ

    @property
    def with_bias(self) -> bool:
        """Whether the last column is the bias's."""
        return len(self.layout.names) == 2

    def add_rows(self, rows: Tensor) -> None:
        """Add the output gradients r, [B, G, T, O]."""
        total = self.row_squares if self._is_long(rows.shape[1], rows.shape[-1]) else self.rows
        total.add(rows)

    def _is_long(self, groups: int, rows: int) -> bool:
        """Whether the factor of so many rows is its diagonal."""
        columns = self.layout.sizes[0] // (groups * rows)
        return rows > LONGEST_ROWS or (rows > WIDE_HEAD and rows >= WIDER * columns)

    def add_columns(self, columns: Tensor, positions: Tensor | None = None) -> None:
        """Add the inputs c, [B, G, T, I]; of groups that see some positions, how many each, [G]."""
        seen = columns.shape[0] * columns.shape[2] if positions is None else positions
        self.positions = self.positions + seen
        self.columns.add(columns)
        if self.with_bias:
            self.column_sum = _sum(self.column_sum, columns.sum((0, 2)))

    def add_column_square(self, square: Tensor, total: Tensor, positions: int) -> None:
        """Add the sum of c c' [I, I] and of c [I] over some positions; one group."""
        self.columns.add_square(square, positions)
        self.positions += positions
        if self.with_bias:
            self.column_sum = _sum(self.column_sum, total[None])

    def add_counts(self, counts: Tensor, positions: int) -> None:
        """Add how often each row was picked, [O], at so many positions."""
        self.positions += positions
        self.counts = _sum(self.counts, counts)

    @property
    def complete(self) -> bool:
        """Whether both sides have been seen."""
        other = self.row_values is not None or self.rows.matrix is not None
        return other and self.columns.matrix is not None

    @property
    def row_values(self) -> Tensor | None:
        """The diagonal of the rows' factor, [G, O], where that is all there is of it."""
        return self.row_squares.diagonal if self.counts is None else self.counts[None]

    @property
    def sums(self) -> dict[str, Tensor]:
        """Sums by name, where those of parts of the data add up to those of all."""
        named = {
            "rows": self.rows.matrix,
            "row_squares": self.row_squares.diagonal,
            "columns": self.columns.matrix,
            "column_sum": self.column_sum,
            "counts": self.counts,
            "positions": torch.as_tensor(self.positions),
        }
        return {name: value for name, value in named.items() if value is not None}

    @classmethod
    def of_sums(cls, layout: Layout, sums: Mapping[str, Tensor]) -> Factors:
        """Factors from what :attr:`sums` gave."""
        squares = SquareSum()
        squares.diagonal = sums.get("row_squares")
        return cls(
            layout,
            GramSum(sums.get("rows")),
            squares,
            GramSum(sums.get("columns")),
            sums.get("column_sum"),
            sums.get("counts"),
            sums["positions"],
        )

    @property
    def cost(self) -> float:
        """Of its eigenvectors, up to a factor."""
        matrices = (self.rows.matrix, self.columns.matrix)
        return float(sum(m.shape[0] * m.shape[-1] ** 3 for m in matrices if m is not None))

    def block(self, prior_precision: float, dtype: torch.dtype) -> KroneckerBlock:
        """The precision in its eigenbasis: products of eigenvalues over M, plus delta."""
        columns = self.columns.matrix
        if columns is not None and self.column_sum is not None:
            columns = _bordered(columns, self.column_sum, self.positions)
        row_values, row_vectors = self._eigen(self.rows.matrix, dtype)
        column_values, column_vectors = self._eigen(columns, dtype)
        if self.row_values is not None:
            row_values, row_vectors = self.row_values, None
        counted = wide(torch.as_tensor(self.positions, device=row_values.device)).reshape(-1, 1)
        shares = row_values / counted.clamp(min=1)
        products = shares[:, :, None] * column_values[:, None, :]
        return KroneckerBlock(
            self.layout,
            (products + prior_precision).to(dtype),
            None if row_vectors is None else row_vectors.to(dtype),
            None if column_vectors is None else column_vectors.to(dtype),
            None if row_vectors is None or len(shares) > 1 else shares[0].to(dtype),
        )

    @staticmethod
    def _eigen(matrix: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        if matrix is None:
            return torch.ones(1, 1, dtype=torch.float64), None
        if matrix.shape[-1] >= SLOW_EIGENVECTORS:
            warnings.warn(
                f"the eigenvectors of a Kronecker factor with {matrix.shape[-1]:,} rows take "
                'minutes, in which nothing is shown; structure="diagonal" needs none',
                stacklevel=2,
            )
        single = dtype != torch.float64 and matrix.shape[-1] >= WIDE_ROWS
        values, vectors = eigh(matrix, single)
        return values.clamp(min=0), vectors


def _sum(total: Tensor | None, value: Tensor) -> Tensor:
    return wide(value) if total is None else total + wide(value)


def _bordered(square: Tensor, total: Tensor, positions: int | Tensor) -> Tensor:
    """The square of columns with a constant 1 appended."""
    size = square.shape[-1]
    result = square.new_empty(square.shape[0], size + 1, size + 1)
    result[:, :size, :size] = square
    result[:, :size, size] = total
    result[:, size, :size] = total
    result[:, size, size] = positions
    return result
