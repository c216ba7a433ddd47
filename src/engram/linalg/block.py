r"""What every block of a Gaussian's precision can do: factorised once, solved many times.

A precision S is block-diagonal; a :class:`Block` is one of its blocks, over some parameters. The
kinds are :mod:`engram.linalg.diagonal`, :mod:`engram.linalg.kronecker`,
:mod:`engram.linalg.dense` and :mod:`engram.linalg.low_rank`. Who has a block asks it what it can
do, and never what kind it is.

A block over one weight matrix [O, I] (:class:`MatrixBlock`) also has shorter ways for gradients
that are a sum of products :math:`\sum_t r_t c_t'` of rows r and columns c, which a layer's gradient
is: no gradient has to be built. A block over weight and bias knows that the bias's column is a
constant 1, and wants the columns without it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import Layout, Named
from engram.errors import PosteriorError
from engram.linalg.cg import ApplyTo, Limits, Solution, conjugate_gradients
from engram.linalg.columns import Columns

# Short ways through wide layers: what they approximate, and from where on they pay
SMALLEST_SIDE = 64  # rows or columns of a matrix; in narrower ones there is little to gain
# Tolerances that an error may have for vectors unlike the data's. Without a bound there, variances
# of unlike inputs came out at a third; a tighter one merges less (docs/decisions.md).
ANY_DIRECTION = 10.0
UNIT_VECTORS = 256  # solved together for a trace, where a block has no shorter way
LARGEST_RANK = 0.25  # terms over the shorter side of a table; more take longer than the table


class Block(ABC):
    """A symmetric positive-definite matrix S over the parameters of a layout.

    Vectors are tensors by name, [..., *shape]; every method maps the leading dimensions.

    Attributes:
        layout: the parameters, with their shapes.
        couples_all: whether S couples every entry with every other.
        is_partial: whether S is exact in some directions only, and isotropic in the others.
    """

    layout: Layout
    couples_all: ClassVar[bool] = False
    is_partial: ClassVar[bool] = False

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters in this block."""
        return self.layout.names

    @abstractmethod
    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1 v."""

    @abstractmethod
    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """S v."""

    @abstractmethod
    def root_solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """R v for some R with R R' = S^-1: turns white noise into samples."""

    @abstractmethod
    def inner_products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """<v_r, S^-1 v_s> for vectors [..., R, *shape], as [..., R, R]."""

    @abstractmethod
    def log_det(self) -> float:
        """log |S|."""

    @abstractmethod
    def scaled(self, scale: float) -> Block:
        """The block times a number."""

    @abstractmethod
    def check(self, where: str) -> None:
        """StorageError unless its tensors are finite and fit its layout.

        Args:
            where: what to call the block in an error.
        """

    def within(self, prior: float, tolerance: float) -> Block:
        """A block that is quicker to pass gradients through, and off by no more than a tolerance.

        Args:
            prior: the part of every eigenvalue that is the prior's.
            tolerance: relative error allowed in how far an average example moves the model.
        """
        return self

    @abstractmethod
    def with_prior(self, prior: Mapping[str, Tensor], base: float, tolerance: float = 0.0) -> Block:
        """The block with a prior of every entry's own, as far as its structure can hold that.

        Args:
            prior: by name, [*shape].
            base: the part of every eigenvalue that is the prior's, until now.
            tolerance: as in :meth:`within`.
        """

    @property
    def knows_inputs(self) -> bool:
        """Whether the inputs of single examples can be taken out of its Kronecker factors."""
        return False

    def without_own_input(self, prior: float) -> Block:
        """The block from which each example's own input is left out, where it knows inputs.

        Args:
            prior: the part of every eigenvalue that is the prior's, and always stays.
        """
        return self

    def without_inputs(self, taken: Tensor, prior: float) -> tuple[Block, float]:
        """The block without some inputs c, and the smallest eigenvalue left over the largest.

        Args:
            taken: the sum of c c' over them, [I, I].
            prior: the part of every eigenvalue that is the prior's, and always stays.
        """
        return self, 0.0

    def outer_sum(self, vectors: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """sum_j w_j v_j v_j' as far as its structure holds it, to be taken from S by :meth:`minus`.

        Args:
            vectors: [B, *shape] by name.
            weights: w, [B].
        """
        raise self._holds_no_part()

    def minus(self, taken: Tensor, floor: float) -> Block:
        """S less what :meth:`outer_sum` gave.

        Args:
            taken: that, or a sum of several.
            floor: the precision that stays in any direction in which S is known by itself.
        """
        raise self._holds_no_part()

    def _holds_no_part(self) -> PosteriorError:
        return PosteriorError(
            "a precision that curvature can be taken out of",
            f"a {type(self).__name__} over {', '.join(self.names)}",
            'fit it with structure="full", "kronecker", "diagonal" or "last_layer"',
        )

    def trace_solve(self, other: Block) -> float:
        """tr(S^-1 S') with the precision of another block over the same parameters."""
        size, total = self.layout.num_params, 0.0
        for start in range(0, size, UNIT_VECTORS):
            count = min(UNIT_VECTORS, size - start)
            rows = torch.zeros(count, size, dtype=torch.float64)
            rows[torch.arange(count), start + torch.arange(count)] = 1
            image = self.solve(other.multiply(self.layout.unflatten(rows)))
            total += float((self.layout.flatten(image).cpu() * rows).sum())
        return total

    def only_kept(self) -> Block:
        """The block with nothing that can move outside the directions in which it is exact."""
        return self

    def in_own_type(self, rows: Tensor) -> Tensor:
        """Rows in the precision that S is known to, where it is known no better than that."""
        return rows

    def solve_without(self, own: ApplyTo, right: Tensor, limits: Limits) -> Solution:
        """(S - H_m)^-1 b_m for every row of b [M, P], by conjugate gradients preconditioned with S.

        Args:
            own: products with H_m.
            right: b, in the order of the layout.
            limits: where it ends.
        """

        def times(vectors: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
            return whole - own(vectors, rows)

        def precondition(vectors: Tensor) -> Tensor:
            return self.layout.flatten(self.solve(self.layout.unflatten(vectors)))

        return conjugate_gradients(times, right, limits, precondition)

    def dense_inverse(self) -> Tensor | None:
        """S^-1 as a matrix [P, P] in the order of the layout, where it is kept as one."""
        return None

    def entrywise_covariance(self) -> Named | None:
        """S^-1 by name where it is diagonal; None where it is not."""
        return None

    @property
    def as_matrix(self) -> MatrixBlock | None:
        """The block itself where it is over one weight matrix, with shorter ways for it."""
        return None


class GradientSum(Protocol):
    """Takes the sum of all gradients, by parameter name, as they come by.

    ``wanted`` says whether products that serve the sum alone are to be made.
    """

    wanted: bool

    def add(self, name: str, value: Tensor) -> None:
        """Add a gradient that is there anyway."""

    def add_outer(self, name: str, shape: torch.Size, rows: Tensor, columns: Tensor) -> None:
        """Add sum_i r_i c_i' for rows [B, O] and columns [B, I]."""


class MatrixBlock(Block):
    """A block over one tensor as a matrix [O, I], or over a weight and its bias.

    Columns that are passed to it do not have the constant 1 of the bias.
    """

    @property
    def as_matrix(self) -> MatrixBlock:
        """The block itself."""
        return self

    # the eigenbasis: S is diagonal there

    precision: Tensor  # eigenvalues

    @abstractmethod
    def with_eigenvalues(self, precision: Tensor) -> MatrixBlock:
        """The block with other eigenvalues in the same eigenbasis."""

    def outer_sum(self, vectors: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """Its diagonal in the eigenbasis, in the shape of the eigenvalues."""
        turned = wide(self.coordinates({name: vectors[name] for name in self.names}))
        return torch.tensordot(weights.to(turned), turned.square(), dims=1)

    def minus(self, taken: Tensor, floor: float) -> MatrixBlock:
        """In the eigenbasis; no eigenvalue falls below the floor, or itself where it is lower."""
        whole = wide(self.precision)
        left = torch.maximum(whole - taken.to(whole), whole.clamp(max=floor))
        return self.with_eigenvalues(left.to(self.precision))

    @abstractmethod
    def coordinates(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Q' v for vectors [..., *shape] by name, in the shape of the eigenvalues."""

    @abstractmethod
    def from_coordinates(self, coordinates: Tensor) -> Named:
        """Q x by name, [..., *shape]."""

    @abstractmethod
    def projected(self, entries: Mapping[str, Tensor]) -> Tensor:
        """The diagonal of Q' diag(v) Q for v [*shape] by name, in the shape of the eigenvalues."""

    @abstractmethod
    def rotate_rows(self, rows: Tensor) -> Tensor:
        """Q_rows' r for [..., O]; one group."""

    @abstractmethod
    def rotate_rows_back(self, rows: Tensor) -> Tensor:
        """Q_rows r for [..., O]; one group."""

    @abstractmethod
    def rotate_columns(self, columns: Tensor) -> Tensor:
        """Q_columns' c for [..., I] without the constant 1 of the bias; one group."""

    @abstractmethod
    def rotate_columns_back(self, columns: Tensor) -> Tensor:
        """Q_columns c for [..., I] of a block without a bias; one group."""

    @property
    @abstractmethod
    def keeps_rows(self) -> bool:
        """Whether S couples no row with another; then there are gains and solves by row."""

    @property
    def turns_positions(self) -> bool:
        """Whether there are products for several positions, in eigenbases of rows and columns."""
        return False

    @abstractmethod
    def rank_one_gain(self, columns: Tensor) -> Tensor:
        """The gain [B, O] of columns c [B, I] with S^-1 (r c') c = gain * r; it keeps rows."""

    @abstractmethod
    def rank_one_perturbation(self, rows: Tensor, columns: Tensor) -> Tensor:
        """S^-1 (r c') c for rows [B, O] and columns [B, I], as [B, O]."""

    @abstractmethod
    def rank_one_products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<r c', S^-1 (s c')> for rows r and s of [B, R, O] and columns [B, I], as [B, R, R]."""

    @abstractmethod
    def solve_rows(self, numbers: Tensor, vectors: Tensor) -> Tensor:
        """S^-1 v for vectors [..., I] in the rows numbered [...] alone; it keeps rows."""

    def position_perturbations(self, rows: Tensor, columns: Tensor, total: GradientSum) -> Tensor:
        """(S^-1 G) c_t with G = sum_t r_t c_t', for rows [B, T, O] and columns [B, T, I].

        Args:
            total: the sum of all G is added to it.

        Returns:
            [B, T, O].
        """
        raise NotImplementedError

    def transposed_perturbations(self, rows: Tensor, columns: Tensor, total: GradientSum) -> Tensor:
        """(S^-1 G)' r_t, [B, T, I]: of a weight that acts on its rows; arguments as above."""
        raise NotImplementedError

    def positions_seen(self, columns: Tensor, uses: int) -> Columns:
        """Columns [B, T, I] as the two methods below want them; called once for both.

        Args:
            uses: how often they are called with these columns.
        """
        raise NotImplementedError

    def position_coordinates(self, rows: Tensor, columns: Columns) -> Tensor:
        """The coordinates of G = sum_t r_t c_t' for rows [B, T, O], as :meth:`coordinates`."""
        raise NotImplementedError

    def position_outputs(self, coordinates: Tensor, columns: Columns) -> Tensor:
        """X c_t for matrices X with these coordinates, [B, T, O]."""
        raise NotImplementedError

    def position_products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """<G_r, S^-1 G_s> for rows [B, R, T, O] and columns [B, T, I], as [B, R, R]."""
        raise NotImplementedError


def check_positive(eigenvalues: Tensor, layout: Layout) -> None:
    """PosteriorError unless all are positive and finite."""
    lowest = float(eigenvalues.min()) if eigenvalues.numel() else 1.0
    if not lowest > 0 or not math.isfinite(float(eigenvalues.max())):
        raise PosteriorError(
            "a positive, finite precision",
            f"eigenvalues from {lowest:.3g} for {', '.join(layout.names)}",
            "raise prior_precision, or train the model further",
        )
