r"""Blocks of a Gaussian's precision, each over some parameters; factorised once, solved many times.

Two kinds are enough. An :class:`EigenBlock` is diagonal after rotating the rows and columns of
one weight matrix: isotropic, diagonal, Kronecker-factored and EK-FAC precisions are all of this
kind, and differ in whether there is a rotation. A :class:`DenseBlock` couples everything in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from engram.core.dtypes import in_double, wide
from engram.core.errors import PosteriorError
from engram.core.parameters import Layout, Named
from engram.linalg.clustered import ClusteredSpectrum, merge
from engram.linalg.factorised_diagonal import thin
from engram.linalg.low_rank import LowRankBlock

SMALLEST_THINNED = 64
ROUNDING = 1e-6  # of the largest eigenvalue, where passes are in single precision


def _rotate(matrix: Tensor, basis: Tensor | None) -> Tensor:
    """[..., G, O, I] times a basis [G, I, I] on the right; one group is one matrix product."""
    if basis is None:
        return matrix
    if basis.shape[0] == 1:
        return matrix @ basis[0]
    return matrix @ basis


@dataclass(frozen=True)
class EigenBlock:
    """Precision ``(Q_rows (x) Q_columns) diag(precision) (...)'`` of a weight, or weight and bias.

    The matrix view [groups, O, I] of the weight is ``weight.reshape(groups, O / groups, -1)``; the
    bias, where it belongs to the block, is the last column.

    Args:
        layout: the parameter, or the weight and its bias, with their shapes.
        precision: eigenvalues of the precision, [G, O, I].
        rows, columns: eigenvectors [G, O, O] and [G, I, I]; None stands for the identity.
        row_share: of Kronecker factors, the row eigenvalues over the number of positions, [O]: the
            curvature that one position with a column c adds is row_share times c c'. None where it
            is not known.
        tolerance: how far the gains of a diagonal block may be off, for speed.
    """

    layout: Layout
    precision: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    row_share: Tensor | None = None
    tolerance: float = 0.0
    covariance: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        lowest = float(self.precision.min()) if self.precision.numel() else 1.0
        if not lowest > 0 or not math.isfinite(float(self.precision.max())):
            raise PosteriorError(
                "a positive, finite precision",
                f"eigenvalues from {lowest:.3g} for {', '.join(self.layout.names)}",
                "raise prior_precision, or train the model further",
            )
        object.__setattr__(self, "covariance", self.precision.reciprocal())

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters in this block."""
        return self.layout.names

    def matrix(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """[..., *shape] per name -> [..., G, O, I]."""
        groups, rows, columns = self.precision.shape
        weight, *bias = (vectors[name] for name in self.names)
        lead = weight.shape[: weight.dim() - len(self.layout.shapes[0])]
        first = weight.reshape(*lead, groups, rows, columns - len(bias))
        if not bias:
            return first
        return torch.cat([first, bias[0].reshape(*lead, groups, rows, 1)], dim=-1)

    def named(self, matrix: Tensor) -> Named:
        """[..., G, O, I] -> [..., *shape] per name."""
        lead = matrix.shape[:-3]
        if len(self.names) == 1:
            return {self.names[0]: matrix.reshape((*lead, *self.layout.shapes[0]))}
        parts = (matrix[..., :-1], matrix[..., -1])
        return {
            name: part.reshape((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.layout.shapes, strict=True)
        }

    def to_basis(self, matrix: Tensor) -> Tensor:
        """Q_rows' M Q_columns."""
        matrix = _rotate(matrix, self.columns)
        return matrix if self.rows is None else _rotate(matrix.mT, self.rows).mT

    def from_basis(self, matrix: Tensor) -> Tensor:
        """Q_rows M Q_columns'."""
        matrix = _rotate(matrix, None if self.columns is None else self.columns.mT)
        return matrix if self.rows is None else _rotate(matrix.mT, self.rows.mT).mT

    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1 v, batched over leading dimensions."""
        if self.parts is not None:
            return self.named(self.parts.step(self.matrix(vectors)))
        return self._scaled(vectors, self.covariance)

    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """S v."""
        return self._scaled(vectors, self.precision)

    def root_solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1/2 v, with v as coordinates in the eigenbasis: turns white noise into samples."""
        return self.named(self.from_basis(self.matrix(vectors) * self.covariance.sqrt()))

    def inner_products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """<v_r, S^-1 v_s> for [..., R, *shape], as [..., R, R]; no rotation back is needed."""
        turned = self.to_basis(self.matrix(vectors)).flatten(-3)
        return turned @ (turned * self.covariance.flatten()).mT

    def _scaled(self, vectors: Mapping[str, Tensor], scale: Tensor) -> Named:
        return self.named(self.from_basis(self.to_basis(self.matrix(vectors)) * scale))

    def log_det(self) -> float:
        """log |S|."""
        return float(wide(self.precision).log().sum())

    def merged(self, prior_precision: float, tolerance: float) -> EigenBlock:
        """The same block with eigenvalues merged that act alike within a tolerance."""
        if self.rows is None or self.columns is None or self.precision.shape[0] > 1:
            return self
        exact = wide(self.precision[0])
        energy = (exact - prior_precision).clamp(min=0)
        covariance, row_order, column_order = merge(exact.reciprocal(), energy, tolerance)
        block = EigenBlock(
            self.layout,
            covariance.reciprocal()[None].to(self.precision.dtype),
            self.rows[:, :, row_order],
            self.columns[:, :, column_order],
            None if self.row_share is None else self.row_share[row_order],
        )
        return self if block.parts is None else block

    @cached_property
    def parts(self) -> ClusteredSpectrum | None:
        """The covariance by kept and merged directions; None where none are merged."""
        if self.rows is None or self.columns is None or self.precision.shape[0] > 1:
            return None
        return ClusteredSpectrum.of(self.covariance[0], self.rows[0], self.columns[0])

    def rank_one_move(self, rows: Tensor, columns: Tensor) -> Tensor:
        """S^-1 (r c') c for rows [B, O] and columns [B, I], [B, O]."""
        if self.parts is None:
            return self.unrotate_rows(self.rotate_rows(rows) * self.rank_one_gain(columns))
        every, kept = self.merged_gains(self.parts, columns)
        moved = (rows @ self.parts.rows * kept) @ self.parts.rows.mT
        return moved.addcmul_(rows, every) if self.parts.merged_rows else moved

    def rank_one_products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<r c', S^-1 (s c')> for rows [B, R, O] and columns [B, I], [B, R, R]."""
        if self.parts is None:
            turned = self.rotate_rows(rows)
            return (turned * self.rank_one_gain(columns)[:, None, :]) @ turned.mT
        every, kept = self.merged_gains(self.parts, columns)
        turned = rows @ self.parts.rows
        products = (turned * kept[:, None, :]) @ turned.mT
        return products + every[:, :, None] * (rows @ rows.mT)

    def rank_one_gain(self, columns: Tensor) -> Tensor:
        """For gradients r c': S^-1 (r c') c = Q (gain * Q' r); the gain [B, O] from c [B, I]."""
        if self.columns is not None:
            columns = columns @ self.columns[0]
        squares = columns * columns
        if self.gain_factors is None:
            return squares @ self.covariance[0].mT
        left, right = self.gain_factors
        return (squares @ right) @ left.mT

    def merged_gains(self, parts: ClusteredSpectrum, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The same where eigenvalues are merged: of all rows [B, 1], and what kept ones add."""
        return parts.gains(columns)

    @cached_property
    def gain_factors(self) -> tuple[Tensor, Tensor] | None:
        """Thin factors [O, m], [I, m] of the covariance where its numerical rank m is small.

        Eigenvalues ``a_i b_j + delta`` have reciprocals of rank about 20 to single precision,
        whatever the layer's size. Entries are weighted by their share in a typical gain, so that
        small covariances in front of large inputs keep their relative accuracy. A diagonal block
        has such factors within its tolerance (:mod:`engram.linalg.factorised_diagonal`).
        """
        if min(self.covariance.shape[1:]) < SMALLEST_THINNED:
            return None
        if self.columns is None:
            return thin(self.covariance[0], self.tolerance)
        covariance = in_double(self.covariance[0])
        typical = in_double(self.precision[0]).mean(0)
        gain = covariance @ typical
        share = covariance * typical / gain[:, None]
        u, singular, v = torch.linalg.svd(share, full_matrices=False)
        precise = self.precision.dtype == torch.float64
        rank = int((singular > (1e-14 if precise else 1e-7) * singular[0]).sum())
        if 4 * rank > min(covariance.shape):
            return None
        left = gain[:, None] * u[:, :rank] * singular[:rank]
        right = v[:rank].mT / typical[:, None]
        return left.to(self.precision), right.to(self.precision)

    def rotate_rows(self, rows: Tensor) -> Tensor:
        """Q_rows' r for [..., O]."""
        return rows if self.rows is None else rows @ self.rows[0]

    def unrotate_rows(self, rows: Tensor) -> Tensor:
        """Q_rows r for [..., O]."""
        return rows if self.rows is None else rows @ self.rows[0].mT


def diagonal_block(name: str, precision: Tensor, tolerance: float = 0.0) -> EigenBlock:
    """A block that is diagonal as it stands, for a parameter of any shape."""
    rows = precision.shape[0] if precision.dim() > 1 else precision.numel()
    table = precision.reshape(1, max(rows, 1), -1)
    return EigenBlock(Layout((name,), (precision.shape,)), table, tolerance=tolerance)


def _not_definite(precision: Tensor) -> PosteriorError:
    """Lost in rounding, as a Gauss-Newton matrix with a small prior can be, or indefinite."""
    expected = "a positive-definite precision"
    remedy = 'train to a minimum, raise prior_precision, or use curvature="ggn"'
    if not torch.isfinite(precision).all():
        return PosteriorError(expected, "a matrix whose smallest eigenvalue is not finite", remedy)
    eigenvalues = torch.linalg.eigvalsh(precision)
    lowest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    got = f"a matrix whose smallest eigenvalue is {lowest:.3g}"
    if abs(lowest) <= ROUNDING * largest:
        got += f", which is within the rounding of its largest, {largest:.3g}"
        remedy = "raise prior_precision, or convert model and data to double precision"
    return PosteriorError(expected, got, remedy)


@dataclass(frozen=True)
class DenseBlock:
    """A full precision matrix over its parameters, kept as its Cholesky factor (lower)."""

    layout: Layout
    cholesky: Tensor

    @classmethod
    def factorise(cls, layout: Layout, precision: Tensor) -> DenseBlock:
        """Cholesky in float64 whatever the model's type: precisions are often ill-conditioned."""
        precision = in_double(precision)
        factor, failed = torch.linalg.cholesky_ex(precision)
        if int(failed) or not torch.isfinite(factor).all():
            raise _not_definite(precision)
        return cls(layout, factor)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters in this block."""
        return self.layout.names

    def _apply(self, vectors: Mapping[str, Tensor], map_columns: str) -> Named:
        flat = self.layout.flatten(vectors)
        columns = flat.reshape(-1, flat.shape[-1]).mT.to(self.cholesky)
        if map_columns == "solve":
            out = torch.cholesky_solve(columns, self.cholesky)
        elif map_columns == "multiply":
            out = self.cholesky @ (self.cholesky.mT @ columns)
        else:
            out = torch.linalg.solve_triangular(self.cholesky.mT, columns, upper=True)
        return self.layout.unflatten(out.mT.reshape(flat.shape).to(flat))

    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1 v, batched over leading dimensions."""
        return self._apply(vectors, "solve")

    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """S v."""
        return self._apply(vectors, "multiply")

    def inner_products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """<v_r, S^-1 v_s> for [..., R, *shape], as [..., R, R]."""
        flat = self.layout.flatten(vectors)
        return flat @ self.layout.flatten(self.solve(vectors)).mT

    def root_solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """C^-T v with S = C C': turns white noise into samples."""
        return self._apply(vectors, "root")

    def log_det(self) -> float:
        """log |S|."""
        return 2 * float(self.cholesky.diagonal().log().sum())


Block = EigenBlock | DenseBlock | LowRankBlock
