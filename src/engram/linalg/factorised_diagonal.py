r"""A diagonal covariance as a short sum of products, so that a pass need not see every entry.

A linear layer at one position needs, of the covariances :math:`C_{oj}` of its weight, only the
gains :math:`\sum_j C_{oj} c_j^2` of its inputs c: a product as large as the layer's own. But an
entry is large where its row's gradients are small and its column's inputs are, and little else is
in the table, so that

.. math:: C_{oj} \approx r_o c_j \Big( 1 + \sum_{k=1}^{m} U_{ok} B_{kj} \Big)

with a few dozen terms. Squares are not negative: if no entry is off by more than a share, no gain
is, whatever the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.dtypes import factorisable
from engram.linalg.clustered import ANY_DIRECTION

LARGEST_SHARE = 0.25  # of the shorter side; more terms do not pay
FIRST = 32  # terms that are tried first, where the layer is wide enough
FEWEST = 16
SEED = 0


def thin(covariance: Tensor, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Factors [O, m] and [I, m] of a table [O, I]; None where it has none that pay.

    Args:
        covariance: positive.
        tolerance: the mean relative error of the entries of a row, weighted by their share in the
            gain of an average input; any single entry may be off by ten times that.

    Example:
        >>> table = torch.linspace(1, 2, 100)[:, None] * torch.linspace(3, 4, 200)
        >>> left, right = thin(table, 0.03)
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
    most = int(LARGEST_SHARE * side) - 1
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
