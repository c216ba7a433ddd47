"""The design: a matrix with named columns, weights, offset and penalty, checked once.

Where the coefficients are not determined, which columns depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.linalg import qr, solve_triangular
from torch import Tensor

from engram.core.arguments import truth
from engram.errors import ArgumentError, DataError, DesignError, NonFiniteError
from engram.models.glm.frames import (
    check_names,
    check_rows,
    column_names,
    frame_names,
    in_order,
)

MENTIONED = 4  # columns named in a message; the others are counted
# rounding of a factor of columns scaled to length 1
RANK_ROUNDING = 10.0  # multiples of machine epsilon times the longer side: a pivot below is zero
NO_PART = 1e-7  # coefficient in a dependence, columns scaled alike: half the digits of float64


@dataclass(frozen=True, eq=False)
class Design:
    """X with what belongs to its rows and columns.

    Args:
        body: X without the column of ones that was asked for, float64.
        ones: whether there is such a column; it is the first of X, and never copied in front of
            the others where the cost of that would show.
        names: of the columns.
        penalty: of each column, [P]: penalty/2 theta^2 is added to the sum of losses at
            dispersion 1, so that it is ridge's alpha.
        weights: of each example's loss, [N].
        offset: added to the linear predictor, [N, 1].
        frequencies: how many examples a row stands for, a factor of its weight, [N]; 1 if None.
    """

    body: Tensor
    ones: bool
    names: tuple[str, ...]
    penalty: Tensor
    weights: Tensor
    offset: Tensor
    frequencies: Tensor | None = None

    @property
    def num_data(self) -> int:
        """N."""
        return len(self.body)

    @property
    def width(self) -> int:
        """P."""
        return len(self.names)

    @property
    def counts(self) -> Tensor:
        """Examples that each row stands for, [N]."""
        return torch.ones_like(self.weights) if self.frequencies is None else self.frequencies

    @property
    def used(self) -> Tensor:
        """The same without rows of weight 0, which no fit has seen, [N]."""
        return torch.where(self.weights > 0, self.counts, 0.0)

    @property
    def taken(self) -> Tensor:
        """The weight that goes when one of the examples of a row is left out, [N]."""
        return self.weights / self.counts.clamp(min=1.0)

    @property
    def precisions(self) -> Tensor:
        """The weight of one of them, by which a dispersion is divided, [N]."""
        return self.weights / torch.where(self.counts > 0, self.counts, 1.0)

    @cached_property
    def matrix(self) -> Tensor:
        """X, [N, P]."""
        return with_ones(self.body) if self.ones else self.body

    def outputs(self, coefficients: Tensor) -> Tensor:
        """f = X theta + offset, [N, K], for coefficients [K, P]."""
        if not self.ones:
            return self.body @ coefficients.mT + self.offset
        return self.body @ coefficients[:, 1:].mT + coefficients[:, 0] + self.offset

    def pull_back(self, seeds: Tensor) -> Tensor:
        """sum_i s_i x_i' for seeds [N, K], [K, P]."""
        total = seeds.mT @ self.body
        return torch.cat([seeds.sum(0)[:, None], total], 1) if self.ones else total

    def read_inputs(self, inputs: Any) -> Tensor:
        """Other inputs as these columns, ones added where the design did, [M, P].

        A data frame's columns are found by name, unless these were never named.
        """
        own = self.names[1:] if self.ones else self.names
        unnamed = own == column_names(None, len(own))
        if frame_names(inputs) is not None and not unnamed:
            whole = sorted(frame_names(inputs) or ()) == sorted(self.names)
            inputs = in_order(inputs, self.names if whole else own)
        matrix = as_matrix(inputs)
        if self.ones and matrix.shape[1] == len(own):
            matrix = with_ones(matrix)
        if matrix.shape[1] != self.width:
            raise ArgumentError(
                f"inputs with the fit's {self.width} columns",
                f"{matrix.shape[1]}",
                "pass the columns that the model was fitted on",
            )
        return matrix

    def read_offset(self, offset: Any, count: int) -> Tensor:
        """Offsets of other inputs, [M, 1]; ArgumentError if there have to be some."""
        if offset is None and bool(self.offset.any()):
            raise ArgumentError(
                "the offset of these inputs, since the model was fitted with one",
                "none",
                "pass the offset (for other data as (X, y, offset)), or zeros",
            )
        return as_column("offset", offset, count, 0.0)[:, None]

    def rows(self, indices: Tensor) -> Design:
        """The design of some examples."""
        parts = (self.weights[indices], self.offset[indices], self.counts[indices])
        return Design(self.body[indices], self.ones, self.names, self.penalty, *parts)


def with_ones(matrix: Tensor) -> Tensor:
    """A column of ones, and the matrix."""
    widened = matrix.new_empty(len(matrix), matrix.shape[1] + 1)
    widened[:, 0], widened[:, 1:] = 1.0, matrix
    return widened


def read_design(
    inputs: Any,
    num_targets: int,
    *,
    penalty: float | Sequence[float] = 0.0,
    intercept: bool = True,
    intercept_penalty: float = 0.0,
    weights: Any = None,
    offset: Any = None,
) -> Design:
    """Check and convert; the intercept, where there is one, is the first column."""
    matrix = as_matrix(inputs)
    names = column_names(inputs, matrix.shape[1])
    if len(matrix) != num_targets:
        raise DataError(
            "as many rows of X as targets",
            f"{len(matrix)} rows and {num_targets} targets",
            "pass X and y of the same examples",
        )
    columns = _penalties(penalty, matrix.shape[1])
    if truth("intercept", intercept):
        names = ("(intercept)" if "intercept" in names else "intercept", *names)
        columns = torch.cat([columns.new_tensor([intercept_penalty]), columns])
    if not names:
        raise DataError(
            "at least one column", "none, and no intercept", "give X, or intercept=True"
        )
    check_names(names)
    check_rows(X=inputs, weights=weights, offset=offset)
    row_weights = as_weights(weights, num_targets)
    shift = as_column("offset", offset, num_targets, 0.0)[:, None]
    return Design(matrix, intercept, names, columns, row_weights, shift)


def as_weights(weights: Any, count: int) -> Tensor:
    """Weights of the examples, [N]; 1 if not given."""
    column = as_column("weights", weights, count, 1.0)
    if (column < 0).any() or not (column > 0).any():
        raise ArgumentError(
            "weights that are not negative and not all zero",
            f"values from {float(column.min()):.4g} to {float(column.max()):.4g}",
            "an example of weight 0 is not used; negative weights have no posterior",
        )
    return column


def count_of(targets: Any) -> int:
    """How many targets there are."""
    try:
        return len(targets)
    except TypeError as error:
        raise DataError(
            "targets y, one per row of X", type(targets).__name__, "pass a list or an array"
        ) from error


def as_matrix(inputs: Any) -> Tensor:
    """A float64 matrix [N, P] of tensor, array, data frame or sparse matrix, all finite."""
    if hasattr(inputs, "toarray"):
        inputs = inputs.toarray()
    try:
        matrix = _as_tensor(inputs)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            "a matrix of numbers", str(error), "encode categories as numbers"
        ) from error
    if matrix.dim() != 2 or len(matrix) == 0:
        raise DataError(
            "a matrix X of shape (examples, columns) with at least one row",
            f"shape {tuple(matrix.shape)}",
            "reshape one column with X[:, None]",
        )
    if not torch.isfinite(torch.linalg.vector_norm(matrix)):
        bad = (~torch.isfinite(matrix)).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            name = column_names(inputs, matrix.shape[1])[column]
            raise NonFiniteError(
                "finite inputs",
                f"{float(matrix[row, column])} for example {row} in column {name!r}",
                "drop that example, or impute the value",
            )
        raise DataError(
            "inputs whose squares are numbers",
            f"values up to {float(matrix.abs().max()):.3g}",
            "divide the columns by their standard deviations",
        )
    return matrix


def as_column(what: str, values: Any, count: int, default: float) -> Tensor:
    """A float64 vector of one finite number per example."""
    if values is None:
        return torch.full((count,), default, dtype=torch.float64)
    try:
        column = _as_tensor(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{what} that are numbers", str(error), f"pass {what} as floats") from error
    if column.dim() == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.shape != (count,):
        raise DataError(
            f"{what} with one number for each of {count} examples",
            f"shape {tuple(column.shape)}",
            f"pass {what} of the same examples as X",
        )
    if not torch.isfinite(column).all():
        where = int((~torch.isfinite(column)).nonzero()[0])
        raise NonFiniteError(
            f"finite {what}", f"{float(column[where])} for example {where}", "drop that example"
        )
    return column


def _as_tensor(values: Any) -> Tensor:
    """Float64 on the CPU, without a copy where none is needed."""
    if isinstance(values, Tensor) and not values.is_complex():
        return values.detach().cpu().double()
    found = np.asarray(values)
    if np.iscomplexobj(found):
        raise TypeError("complex numbers")
    array = np.ascontiguousarray(found, dtype=np.float64)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _penalties(penalty: float | Sequence[float], count: int) -> Tensor:
    try:
        values = torch.as_tensor(penalty, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        values = torch.full((count,), torch.nan, dtype=torch.float64)
    if values.dim() == 0:
        values = values.expand(count).clone()
    if values.shape != (count,) or not (torch.isfinite(values) & (values >= 0)).all():
        raise ArgumentError(
            f"a penalty of 0 or more, one number or one for each of {count} columns",
            repr(penalty),
            "use penalty=0.0 for none",
        )
    return values


def check_rank(design: Design, remedy: str = "drop them, or use penalty > 0") -> None:
    """DesignError, naming columns, unless the weighted design with its penalty has full rank.

    Example:
        >>> from engram.models.glm.design import read_design
        >>> x = torch.arange(12.0).reshape(6, 2)
        >>> try:
        ...     check_rank(read_design(torch.cat([x, 3 * x[:, 1:]], 1), 6, intercept=False))
        ... except DesignError as error:
        ...     print(error.got)
        3 columns of rank 2: x2 = 3 x1
    """
    rows = torch.cat([design.weights.sqrt()[:, None] * design.matrix, design.penalty.sqrt().diag()])
    scale = rows.norm(dim=0)
    scaled = (rows / scale.clamp(min=torch.finfo(torch.float64).tiny)).numpy()
    triangle, order = qr(scaled, mode="r", pivoting=True, overwrite_a=True)[:2]
    diagonal = np.abs(np.diagonal(triangle))
    count = len(order)
    tolerance = RANK_ROUNDING * max(scaled.shape) * np.finfo(float).eps
    rank = int((diagonal > tolerance * max(float(diagonal[0]), tolerance)).sum())
    if rank == count:
        return
    # each dependent column as a combination of the independent ones, in the data's own units
    shares = solve_triangular(triangle[:rank, :rank], triangle[:rank, rank:count])
    lines = []
    for position, column in enumerate(order[rank:][:MENTIONED]):
        terms = _terms(design, shares[:, position], order[:rank], scale.numpy(), int(column))
        lines.append(f"{design.names[column]} = {terms}")
    more = count - rank - MENTIONED
    raise DesignError(
        "columns that are linearly independent",
        f"{count} columns of rank {rank}: {'; '.join(lines)}"
        + (f"; and {more} more" if more > 0 else ""),
        remedy,
    )


def _terms(
    design: Design, shares: np.ndarray, basis: np.ndarray, scale: np.ndarray, column: int
) -> str:
    involved = [k for k in np.argsort(-np.abs(shares)) if abs(shares[k]) > NO_PART]
    if not involved or scale[column] == 0:
        return "0 everywhere"
    text = ""
    for k in involved[:MENTIONED]:
        share = shares[k] * scale[column] / scale[basis[k]]
        size = f"{abs(share):.4g}"
        sign = ("-" if share < 0 else "") if not text else (" - " if share < 0 else " + ")
        text += sign + ("" if size == "1" else f"{size} ") + design.names[basis[k]]
    return text + (" + ..." if len(involved) > MENTIONED else "")
