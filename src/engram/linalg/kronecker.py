r"""A precision that is diagonal after rotating the rows and the columns of one weight matrix.

.. math:: S = (Q_r \otimes Q_c)\, \mathrm{diag}(s)\, (Q_r \otimes Q_c)'

K-FAC, with eigenvalues :math:`a_o b_i + \delta`, and EK-FAC are of this kind; one of the two
rotations may be missing.

**Without the own example.** Kronecker factors say :math:`S = R \otimes \sum_j c_j c_j' + \delta`,
with R the mean curvature at the layer's output and :math:`c_j` its inputs. Without example i the
second factor loses :math:`c_i c_i'`, and nothing else is needed: in an eigendirection of R with
eigenvalue r the gain :math:`q = c_i' (r \sum_j c_j c_j' + \delta)^{-1} c_i` of a gradient at one
position becomes

.. math:: c_i' \Big(r \sum_{j \ne i} c_j c_j' + \delta\Big)^{-1} c_i = \frac{q}{1 - r q}.

What is taken out is in the factor as it stands, so that r q is below 1 and the gain at most
:math:`|c_i|^2 / \delta`, the prior's alone. Subtracting the example's own Gauss-Newton matrix
from S instead takes out what the factors have averaged over all examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from engram.core.dtypes import eigh, in_double, wide
from engram.core.parameters import Layout, Named
from engram.core.storage.kinds import check_numbers, check_that
from engram.linalg.block import Block, GradientSum, MatrixBlock, check_positive
from engram.linalg.clustered import ClusteredSpectrum, merge, rotated
from engram.linalg.columns import Columns
from engram.linalg.eigenbases import Eigenbases, gain_factors


def _rotate(matrix: Tensor, basis: Tensor | None) -> Tensor:
    """[..., G, O, I] times a basis [G, I, I] on the right; one group is one matrix product."""
    if basis is None:
        return matrix
    if basis.shape[0] == 1:
        return matrix @ basis[0]
    return matrix @ basis


def _overlap(own: Tensor | None, other: Tensor | None, groups: int, size: int) -> Tensor:
    """Squares of the inner products q_a'p_b of two bases, [G, n, n]; None is the identity."""
    identity = torch.eye(size, dtype=torch.float64).expand(groups, size, size)
    first = identity if own is None else in_double(own).expand(groups, size, size)
    second = identity if other is None else in_double(other).expand(groups, size, size)
    return (first.mT @ second.to(first)).square()


@dataclass(frozen=True)
class KroneckerBlock(MatrixBlock):
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
        own_left_out: where every example's own input is left out, at layers with one position, the
            precision that is left in any direction, the prior's; None where nothing is left out.
            Where a layer acts at many positions, no example has much of the factor.

    Example:
        >>> layout = Layout(("w",), (torch.Size((1, 2)),))
        >>> turn = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> block = KroneckerBlock(layout, torch.tensor([[[1.0, 4.0]]]), columns=turn)
        >>> block.solve({"w": torch.tensor([[4.0, 3.0]])})
        {'w': tensor([[1., 3.]])}
    """

    layout: Layout
    precision: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    row_share: Tensor | None = None
    own_left_out: float | None = None
    covariance: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(self.precision, self.layout)
        object.__setattr__(self, "covariance", self.precision.reciprocal())

    @property
    def tensors(self) -> Named:
        """Those that it was made of, by the names of its arguments."""
        names = ("precision", "rows", "columns", "row_share")
        named = {name: getattr(self, name) for name in names}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def with_bias(self) -> bool:
        """Whether the last column is the bias's."""
        return len(self.names) == 2

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
        parts = (matrix[..., :-1], matrix[..., -1]) if self.with_bias else (matrix,)
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

    def coordinates(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Q' v, [..., G, O, I]."""
        return self.to_basis(self.matrix(vectors))

    def from_coordinates(self, coordinates: Tensor) -> Named:
        """Q x by name."""
        return self.named(self.from_basis(coordinates))

    def projected(self, entries: Mapping[str, Tensor]) -> Tensor:
        """The diagonal in the eigenbasis of a matrix that is diagonal as it stands, [G, O, I]."""
        found = wide(self.matrix(entries))
        if self.columns is not None:
            found = found @ wide(self.columns).square()
        return found if self.rows is None else wide(self.rows).square().mT @ found

    def _times(self, vectors: Mapping[str, Tensor], scale: Tensor) -> Named:
        return self.named(self.from_basis(self.to_basis(self.matrix(vectors)) * scale))

    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1 v."""
        if self.clusters is not None:
            return self.named(self.clusters.step(self.matrix(vectors)))
        return self._times(vectors, self.covariance)

    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """S v."""
        return self._times(vectors, self.precision)

    def root_solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1/2 v, with v as coordinates in the eigenbasis."""
        return self.named(self.from_basis(self.matrix(vectors) * self.covariance.sqrt()))

    def inner_products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """<v_r, S^-1 v_s> for [..., R, *shape], as [..., R, R]; no rotation back is needed."""
        turned = self.to_basis(self.matrix(vectors)).flatten(-3)
        return turned @ (turned * self.covariance.flatten()).mT

    def log_det(self) -> float:
        """The sum of the logarithms of the eigenvalues."""
        return float(wide(self.precision).log().sum())

    def with_eigenvalues(self, precision: Tensor) -> KroneckerBlock:
        """Other eigenvalues; an input's part in them is no longer known."""
        return KroneckerBlock(self.layout, precision, self.rows, self.columns)

    def trace_solve(self, other: Block) -> float:
        """By the squares of inner products of both sides' eigenvectors, where both have some."""
        if not isinstance(other, KroneckerBlock) or other.precision.shape != self.precision.shape:
            return super().trace_solve(other)
        groups, rows, columns = self.precision.shape
        left = _overlap(self.rows, other.rows, groups, rows)
        right = _overlap(self.columns, other.columns, groups, columns)
        projected = left @ in_double(other.precision) @ right.mT
        return float((projected / in_double(self.precision)).sum())

    def scaled(self, scale: float) -> KroneckerBlock:
        """The block times a number; an input's part in it is no longer known."""
        return KroneckerBlock(self.layout, self.precision * scale, self.rows, self.columns)

    def with_prior(
        self, prior: Mapping[str, Tensor], base: float, tolerance: float = 0.0
    ) -> KroneckerBlock:
        """Its diagonal in the eigenbasis; inputs are no longer known."""
        curvature = (wide(self.precision) - base).clamp(min=0)
        precision = (curvature + self.projected(prior)).to(self.precision)
        block = KroneckerBlock(self.layout, precision, self.rows, self.columns)
        merges = tolerance > 0 and self._turns_both
        return block._merged(curvature[0], tolerance) if merges else block

    def check(self, where: str) -> None:
        """Finite eigenvalues for the parameters, and eigenvectors that fit them."""
        layout, shape = self.layout, self.precision.shape
        check_numbers(f"the precision of {where}", self.precision)
        check_numbers(f"the inverse precision of {where}", self.covariance)
        check_that(len(shape) == 3, f"a precision [G, O, I] in {where}", f"{list(shape)}")
        groups, rows, columns = shape
        sizes = (groups * rows * (columns - len(layout.names) + 1), groups * rows)
        fits = layout.sizes == sizes[: len(layout.names)]
        check_that(fits, f"a precision for {', '.join(layout.names)}", f"shape {list(shape)}")
        wanted = {"rows": (groups, rows, rows), "columns": (groups, columns, columns)}
        for name, size in (wanted | {"row_share": (rows,)}).items():
            part = getattr(self, name)
            if part is not None:
                check_numbers(f"{name} of {where}", part, size)
        left = self.own_left_out
        check_that(left is None or left > 0, f"a positive precision left in {where}", f"{left}")

    # wide layers: eigenvalues that act alike

    def within(self, prior: float, tolerance: float) -> KroneckerBlock:
        """The same block with eigenvalues merged that act alike within a tolerance."""
        if not self._turns_both:
            return self
        return self._merged((wide(self.precision[0]) - prior).clamp(min=0), tolerance)

    def _merged(self, energy: Tensor, tolerance: float) -> KroneckerBlock:
        """Eigenvalues merged that act alike for gradients with this energy, [O, I]."""
        assert self.rows is not None
        assert self.columns is not None
        exact = wide(self.precision[0])
        covariance, row_order, column_order = merge(exact.reciprocal(), energy, tolerance)
        block = KroneckerBlock(
            self.layout,
            covariance.reciprocal()[None].to(self.precision.dtype),
            self.rows[:, :, row_order],
            self.columns[:, :, column_order],
            None if self.row_share is None else self.row_share[row_order],
        )
        return self if block.clusters is None else block

    @cached_property
    def clusters(self) -> ClusteredSpectrum | None:
        """The covariance by kept and merged directions; None where none are merged."""
        if self.rows is None or self.columns is None or self.precision.shape[0] > 1:
            return None
        return ClusteredSpectrum.of(self.covariance[0], self.rows[0], self.columns[0])

    # one position

    @property
    def keeps_rows(self) -> bool:
        """Whether there is no rotation of rows."""
        return self.rows is None

    def rotate_rows(self, rows: Tensor) -> Tensor:
        """Q_rows' r for [..., O]; one group."""
        return rows if self.rows is None else rows @ self.rows[0]

    def rotate_rows_back(self, rows: Tensor) -> Tensor:
        """Q_rows r for [..., O]; one group."""
        return rows if self.rows is None else rows @ self.rows[0].mT

    def rotate_columns(self, columns: Tensor) -> Tensor:
        """Q_columns' c for [..., I] without the constant 1 of the bias; one group."""
        if self.columns is not None:
            return rotated(columns, self.columns[0])
        if not self.with_bias:
            return columns
        return torch.cat([columns, torch.ones_like(columns[..., :1])], dim=-1)

    def rotate_columns_back(self, columns: Tensor) -> Tensor:
        """Q_columns c for [..., I] of a block without a bias; one group."""
        return columns if self.columns is None else columns @ self.columns[0].mT

    def rank_one_gain(self, columns: Tensor) -> Tensor:
        """The gain with S^-1 (r c') c = Q (gain * Q' r), [B, O] from c [B, I]."""
        squares = self.rotate_columns(columns).square()
        if self._gain_factors is None:
            gain = squares @ self.covariance[0].mT
        else:
            left, right = self._gain_factors
            gain = (squares @ right) @ left.mT
        if self.own_left_out is None:
            return gain
        assert self.row_share is not None
        return self._without_own(gain, self.row_share, columns)

    def _clustered_gains(
        self, clusters: ClusteredSpectrum, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same where eigenvalues are merged: of all rows [B, 1], and what kept ones add."""
        every, added = clusters.gains(columns)
        if self.own_left_out is None:
            return every, added
        assert self.row_share is not None
        kept = clusters.rows.shape[1]
        own = self._without_own(every + added, self.row_share[:kept], columns)
        if clusters.merged_rows:
            every = self._without_own(every, self.row_share[kept:].mean(), columns)
        return every, own - every

    def rank_one_perturbation(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Q (gain * Q' r), [B, O]."""
        if self.clusters is None:
            turned = self.rotate_rows(rows) * self.rank_one_gain(columns)
            return self.rotate_rows_back(turned)
        return self.clusters.rank_one_perturbation(
            rows, *self._clustered_gains(self.clusters, columns)
        )

    def rank_one_products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<r c', S^-1 (s c')> for rows [B, R, O] and columns [B, I], [B, R, R]."""
        if self.clusters is None:
            turned = self.rotate_rows(rows)
            return (turned * self.rank_one_gain(columns)[:, None, :]) @ turned.mT
        return self.clusters.rank_one_products(rows, *self._clustered_gains(self.clusters, columns))

    @cached_property
    def _gain_factors(self) -> tuple[Tensor, Tensor] | None:
        return None if self.columns is None else gain_factors(self.precision[0])

    def solve_rows(self, numbers: Tensor, vectors: Tensor) -> Tensor:
        """S^-1 v for vectors [..., I] in the rows numbered [...] alone; no rotation of rows."""
        scale = self.covariance.flatten(0, 1)[numbers]
        if self.columns is None:
            return vectors * scale
        return (vectors @ self.columns[0] * scale) @ self.columns[0].mT

    # several positions

    @property
    def turns_positions(self) -> bool:
        """A rotation of the columns, of one group whose rows are those of the weight."""
        groups, rows, _ = self.precision.shape
        whole = groups == 1 and rows == self.layout.shapes[0][0]
        return whole and self.columns is not None

    @property
    def _turns_both(self) -> bool:
        """A rotation of rows too."""
        return self.turns_positions and self.rows is not None

    @cached_property
    def _eigenbases(self) -> Eigenbases:
        assert self.columns is not None
        rows = None if self.rows is None else self.rows[0]
        columns, covariance = self.columns[0], self.covariance[0]
        return Eigenbases(rows, columns, covariance, self.with_bias, self.clusters)

    def position_perturbations(self, rows: Tensor, columns: Tensor, total: GradientSum) -> Tensor:
        """(S^-1 G) c_t, [B, T, O], by the way with the fewest multiplications."""
        found, summed = self._eigenbases.perturbations(rows, columns)
        if summed is not None:
            for name, value in self.named(summed[None]).items():
                total.add(name, value)
            return found
        flat = rows.flatten(0, 1)
        total.add_outer(self.names[0], self.layout.shapes[0], flat, columns.flatten(0, 1))
        if self.with_bias:
            total.add(self.names[1], flat.sum(0))
        return found

    def positions_seen(self, columns: Tensor, uses: int) -> Columns:
        """Columns [B, T, I], turned where that is shorter than turning matrices so many times."""
        return self._eigenbases.seen(columns, uses)

    def position_coordinates(self, rows: Tensor, columns: Columns) -> Tensor:
        """Coordinates of sum_t r_t c_t', [B, G, O, I]."""
        return self._eigenbases.coordinates(rows, columns)[:, None]

    def position_outputs(self, coordinates: Tensor, columns: Columns) -> Tensor:
        """What the matrices with these coordinates make of the columns, [B, T, O]."""
        return self._eigenbases.outputs(coordinates[:, 0], columns)

    @cached_property
    def _transposed_eigenbases(self) -> Eigenbases:
        """Those of the transposed weight, which rows and columns have changed places for."""
        assert self.rows is not None
        assert self.columns is not None
        rows, columns, covariance = self.rows[0], self.columns[0], self.covariance[0].mT
        clusters = ClusteredSpectrum.of(covariance, columns, rows)
        return Eigenbases(columns, rows, covariance.contiguous(), False, clusters)

    def transposed_perturbations(self, rows: Tensor, columns: Tensor, total: GradientSum) -> Tensor:
        """(S^-1 G)' r_t, [B, T, I], likewise; of a weight without a bias."""
        found, summed = self._transposed_eigenbases.perturbations(columns, rows)
        if summed is not None:
            total.add(self.names[0], summed.mT.reshape(self.layout.shapes[0]))
        else:
            shape = self.layout.shapes[0]
            total.add_outer(self.names[0], shape, rows.flatten(0, 1), columns.flatten(0, 1))
        return found

    def position_products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<G_r, S^-1 G_s>, [B, R, R]."""
        return self._eigenbases.products(rows, columns)

    # examples left out

    @property
    def knows_inputs(self) -> bool:
        """Whether the factors are known as such."""
        return self.row_share is not None

    def without_own_input(self, prior: float) -> KroneckerBlock:
        """The block from which each example's own input is left out, where it knows inputs."""
        return replace(self, own_left_out=prior) if self.knows_inputs else self

    def _without_own(self, gain: Tensor, share: Tensor, columns: Tensor) -> Tensor:
        """q / (1 - r q), bounded by the prior's gain.

        The bound holds where merged eigenvalues are not quite consistent with an input.
        """
        assert self.own_left_out is not None
        length = columns.square().sum(1, keepdim=True) + self.with_bias
        left = 1 - share * gain
        largest = (length / self.own_left_out).expand_as(gain)
        return torch.where(left * largest > gain, gain / left, largest)

    def without_inputs(self, taken: Tensor, prior: float) -> tuple[KroneckerBlock, float]:
        r"""The block with :math:`\sum_j c_j c_j' - T` in its second factor, in its own eigenbasis.

        Beside it the smallest eigenvalue of that factor over the largest: below 0 where more was
        taken out than was in it, which is held at 0.
        """
        if self.row_share is None:
            return self, 0.0
        assert self.columns is not None
        shares, basis = in_double(self.row_share), in_double(self.columns[0])
        largest = int(shares.argmax())
        if not shares[largest] > 0:  # no curvature to take anything from
            return self, 0.0
        values = (in_double(self.precision[0, largest]) - prior).clamp(min=0) / shares[largest]
        left = torch.diag(values) - basis.mT @ in_double(taken) @ basis
        remaining, turn = eigh(0.5 * (left + left.mT))
        precision = shares[:, None] * remaining.clamp(min=0) + prior
        left_out = KroneckerBlock(
            self.layout,
            precision[None].to(self.precision),
            self.rows,
            (basis @ turn)[None].to(self.columns),
            self.row_share,
        )
        tiny = torch.finfo(values.dtype).tiny
        return left_out, float(remaining[0] / values.max().clamp(min=tiny))
