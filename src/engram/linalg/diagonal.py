r"""A precision that is diagonal as it stands, and its covariance as a short sum of products.

A linear layer at one position needs, of the covariances :math:`C_{oj}` of its weight, only the
gains :math:`\sum_j C_{oj} c_j^2` of its inputs c: a product as large as the layer's own. But an
entry is large where its row's gradients are small and its column's inputs are, and little else is
in the table, so that

.. math:: C_{oj} \approx r_o c_j \Big( 1 + \sum_{k=1}^{m} U_{ok} B_{kj} \Big)

with a few dozen terms: a factorised diagonal. Squares are not negative: if no entry is off by more
than a share, no gain is, whatever the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from engram.core.dtypes import factorisable, wide
from engram.core.parameters import Layout, Named
from engram.core.storage.kinds import check_numbers, check_that
from engram.linalg.block import (
    ANY_DIRECTION,
    LARGEST_RANK,
    SMALLEST_SIDE,
    Block,
    MatrixBlock,
    check_positive,
)

# Terms of the factorised diagonal: every number that is tried takes a decomposition, and every
# term that is kept two products a pass
FIRST = 32  # terms that are tried first, where so many can pay; then twice as many, and so on
FEWEST = 16  # terms that are tried first in narrower layers
SEED = 0  # of the random directions that the terms are found from: the same table, the same terms


@dataclass(frozen=True)
class DiagonalBlock(MatrixBlock):
    """A precision S = diag(s) over one parameter of any shape.

    As a matrix the parameter is [O, I] with its first dimension as rows; a vector is a column.

    Args:
        layout: the parameter, with its shape.
        precision: s, in the parameter's shape.
        tolerance: how far the gains of rank-one gradients may be off, for speed.

    Example:
        >>> block = DiagonalBlock.of("w", torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
        >>> block.rank_one_perturbation(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]))
        tensor([[3.0000, 0.7500]])
    """

    layout: Layout
    precision: Tensor
    tolerance: float = 0.0
    covariance: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(self.precision, self.layout)
        object.__setattr__(self, "covariance", self.precision.reciprocal())

    @classmethod
    def of(cls, name: str, precision: Tensor, tolerance: float = 0.0) -> DiagonalBlock:
        """The block of one parameter."""
        return cls(Layout((name,), (precision.shape,)), precision, tolerance)

    def coordinates(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The vectors as they are."""
        return vectors[self.names[0]]

    def from_coordinates(self, coordinates: Tensor) -> Named:
        """The coordinates as they are."""
        return {self.names[0]: coordinates}

    def projected(self, entries: Mapping[str, Tensor]) -> Tensor:
        """The entries as they are."""
        return entries[self.names[0]]

    def rotate_rows(self, rows: Tensor) -> Tensor:
        """The rows as they are."""
        return rows

    def rotate_rows_back(self, rows: Tensor) -> Tensor:
        """The rows as they are."""
        return rows

    def rotate_columns(self, columns: Tensor) -> Tensor:
        """The columns as they are."""
        return columns

    def rotate_columns_back(self, columns: Tensor) -> Tensor:
        """The columns as they are."""
        return columns

    def _times(self, vectors: Mapping[str, Tensor], scale: Tensor) -> Named:
        (name,) = self.names
        return {name: vectors[name] * scale}

    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """v / s."""
        return self._times(vectors, self.covariance)

    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """s v."""
        return self._times(vectors, self.precision)

    def root_solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """v over the root of s."""
        return self._times(vectors, self.covariance.sqrt())

    def inner_products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """<v_r, S^-1 v_s> for [..., R, *shape], as [..., R, R]."""
        flat = self.layout.flatten(vectors)
        return flat @ (flat * self.covariance.flatten()).mT

    def log_det(self) -> float:
        """The sum of the logarithms of s."""
        return float(wide(self.precision).log().sum())

    def with_eigenvalues(self, precision: Tensor) -> DiagonalBlock:
        """Another diagonal."""
        return replace(self, precision=precision)

    def trace_solve(self, other: Block) -> float:
        """The sum of ratios where both are diagonal."""
        if not isinstance(other, DiagonalBlock):
            return super().trace_solve(other)
        return float((wide(other.precision) / wide(self.precision)).sum())

    def scaled(self, scale: float) -> DiagonalBlock:
        """The block times a number."""
        return replace(self, precision=self.precision * scale)

    def within(self, prior: float, tolerance: float) -> DiagonalBlock:
        """The same block, whose gains may be those of a factorised diagonal."""
        return replace(self, tolerance=tolerance)

    def with_prior(
        self, prior: Mapping[str, Tensor], base: float, tolerance: float = 0.0
    ) -> DiagonalBlock:
        """Entry by entry."""
        curvature = (wide(self.precision) - base).clamp(min=0)
        precision = (curvature + wide(prior[self.names[0]])).to(self.precision)
        return replace(self, precision=precision, tolerance=tolerance)

    def entrywise_covariance(self) -> Named:
        """1 / s, by name."""
        return {self.names[0]: self.covariance}

    def check(self, where: str) -> None:
        """A finite precision in the parameter's shape."""
        shape = tuple(self.layout.shapes[0])
        check_that(len(self.names) == 1, f"one parameter in {where}", f"{len(self.names)}")
        check_numbers(f"the precision of {where}", self.precision, shape)
        check_numbers(f"the inverse precision of {where}", self.covariance)
        possible = 0 <= self.tolerance < math.inf
        check_that(possible, f"a tolerance in {where}", f"{self.tolerance}")

    @property
    def keeps_rows(self) -> bool:
        """No row is coupled with another."""
        return True

    @cached_property
    def _table(self) -> Tensor:
        """The covariance as [O, I]."""
        rows = len(self.covariance) if self.covariance.dim() > 1 else self.covariance.numel()
        return self.covariance.reshape(max(rows, 1), -1)

    @cached_property
    def gain_factors(self) -> tuple[Tensor, Tensor] | None:
        """Factors [O, m], [I, m] of the covariance within the tolerance; None where none pay."""
        if min(self._table.shape) < SMALLEST_SIDE:
            return None
        return factorised(self._table, self.tolerance)

    def rank_one_gain(self, columns: Tensor) -> Tensor:
        """sum_j C_oj c_j^2, [B, O]."""
        squares = columns * columns
        if self.gain_factors is None:
            return squares @ self._table.mT
        left, right = self.gain_factors
        return (squares @ right) @ left.mT

    def rank_one_perturbation(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The gain times r, [B, O]."""
        return rows * self.rank_one_gain(columns)

    def rank_one_products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<r c', S^-1 (s c')> for rows [B, R, O] and columns [B, I], [B, R, R]."""
        return (rows * self.rank_one_gain(columns)[:, None, :]) @ rows.mT

    def solve_rows(self, numbers: Tensor, vectors: Tensor) -> Tensor:
        """S^-1 v for vectors [..., I] in the rows numbered [...] alone."""
        return vectors * self._table[numbers]


def factorised(covariance: Tensor, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Factors [O, m] and [I, m] of a table [O, I]; None where it has none that pay.

    Args:
        covariance: positive.
        tolerance: the mean relative error of the entries of a row, weighted by their share in the
            gain of an average input; any single entry may be off by ten times that.

    Example:
        >>> table = torch.linspace(1, 2, 100)[:, None] * torch.linspace(3, 4, 200)
        >>> left, right = factorised(table, 0.03)
        >>> torch.allclose(left @ right.mT, table)
        True
    """
    if tolerance == 0:
        return None
    given, covariance = covariance, factorisable(covariance)
    by_row, by_column = covariance.mean(1), covariance.mean(0)
    by_column = by_column / by_column.mean()
    table = covariance / torch.outer(by_row, by_column)
    rest = table - 1
    weights = covariance * _typical_squares(covariance)
    allowed = tolerance * weights.sum(1)
    for count in _counts(min(covariance.shape)):
        left, right = _leading(rest, count)
        error = torch.addmm(rest, left, right.mT, alpha=-1).div_(table).abs_()
        if error.max() > ANY_DIRECTION * tolerance:
            continue
        if ((weights * error).sum(1) <= allowed).all():
            rows, columns = _scaled(by_row, left), _scaled(by_column, right)
            return rows.to(given), columns.to(given)
    return None


def _scaled(scale: Tensor, terms: Tensor) -> Tensor:
    """The terms with the constant one in front, times a scale for every row."""
    return scale[:, None] * torch.cat([torch.ones_like(terms[:, :1]), terms], dim=1)


def _counts(side: int) -> list[int]:
    """How many terms to try, from few to as many as pay."""
    most = int(LARGEST_RANK * side) - 1
    found, count = [], FIRST if most >= FIRST else FEWEST
    while count <= most:
        found.append(count)
        count *= 2
    return found


def _typical_squares(covariance: Tensor) -> Tensor:
    """Squares of an average input up to a factor, from the curvature that its column has."""
    precision = covariance.reciprocal()
    return (precision - precision.min()).mean(0)


def _leading(table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """About the best factors of so many terms, by a random start and one iteration."""
    generator = torch.Generator().manual_seed(SEED)
    start = torch.randn(table.shape[1], count, generator=generator, dtype=torch.float64)
    rows, _ = torch.linalg.qr(table @ start.to(table))
    columns, _ = torch.linalg.qr(table.mT @ rows)
    rows, _ = torch.linalg.qr(table @ columns)
    return rows, table.mT @ rows
