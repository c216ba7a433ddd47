"""A precision as a full matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engram.core.dtypes import in_double
from engram.core.parameters import Layout, Named
from engram.core.storage.kinds import check_numbers, check_that
from engram.errors import PosteriorError
from engram.linalg.block import Block

# Of the largest eigenvalue: a smallest one below this may be rounding of passes in single precision
ROUNDING = 1e-6


@dataclass(frozen=True)
class DenseBlock(Block):
    """A full precision matrix S = C C' over its parameters.

    Args:
        layout: the parameters, with their shapes.
        cholesky: C, lower, [P, P].

    Example:
        >>> layout = Layout(("w",), (torch.Size((2,)),))
        >>> block = DenseBlock.factorise(layout, torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> block.solve({"w": torch.tensor([3.0, 3.0])})
        {'w': tensor([1., 1.])}
    """

    layout: Layout
    cholesky: Tensor
    couples_all: ClassVar[bool] = True

    @classmethod
    def factorise(cls, layout: Layout, precision: Tensor) -> DenseBlock:
        """Cholesky in float64 whatever the model's type: precisions are often ill-conditioned."""
        precision = in_double(precision)
        factor, failed = torch.linalg.cholesky_ex(precision)
        if int(failed) or not torch.isfinite(factor).all():
            raise _not_definite(precision)
        return cls(layout, factor)

    def _apply(
        self, vectors: Mapping[str, Tensor], to_columns: Callable[[Tensor], Tensor]
    ) -> Named:
        flat = self.layout.flatten(vectors)
        columns = flat.reshape(-1, flat.shape[-1]).mT.to(self.cholesky)
        return self.layout.unflatten(to_columns(columns).mT.reshape(flat.shape).to(flat))

    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1 v by two triangular solves."""
        return self._apply(vectors, lambda v: torch.cholesky_solve(v, self.cholesky))

    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """C C' v."""
        return self._apply(vectors, lambda v: self.cholesky @ (self.cholesky.mT @ v))

    def root_solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """C^-T v."""
        upper = self.cholesky.mT
        return self._apply(vectors, lambda v: torch.linalg.solve_triangular(upper, v, upper=True))

    def inner_products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """<v_r, S^-1 v_s> for [..., R, *shape], as [..., R, R]."""
        flat = self.layout.flatten(vectors)
        return flat @ self.layout.flatten(self.solve(vectors)).mT

    def log_det(self) -> float:
        """Twice the sum of the logarithms of C's diagonal."""
        return 2 * float(self.cholesky.diagonal().log().sum())

    def outer_sum(self, vectors: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """The matrix itself, [P, P]."""
        rows = self.layout.flatten({name: vectors[name] for name in self.names})
        rows = rows.to(self.cholesky)
        return rows.mT @ (weights.to(rows)[:, None] * rows)

    def minus(self, taken: Tensor, floor: float) -> DenseBlock:
        """S less a matrix; PosteriorError where what is left is not positive definite."""
        matrix = self.cholesky @ self.cholesky.mT
        return DenseBlock.factorise(self.layout, matrix - taken.to(matrix))

    def trace_solve(self, other: Block) -> float:
        """By a triangular solve where both are matrices."""
        if not isinstance(other, DenseBlock):
            return super().trace_solve(other)
        root = torch.linalg.solve_triangular(
            self.cholesky, other.cholesky.to(self.cholesky), upper=False
        )
        return float(root.square().sum())

    def scaled(self, scale: float) -> DenseBlock:
        """The block times a number."""
        return DenseBlock(self.layout, self.cholesky * scale**0.5)

    def with_prior(
        self, prior: Mapping[str, Tensor], base: float, tolerance: float = 0.0
    ) -> DenseBlock:
        """On the diagonal."""
        matrix = self.cholesky @ self.cholesky.mT
        matrix.diagonal().add_(self.layout.flatten(prior).to(matrix) - base)
        return DenseBlock.factorise(self.layout, matrix)

    def dense_inverse(self) -> Tensor:
        """S^-1, [P, P]."""
        return torch.cholesky_inverse(self.cholesky)

    def check(self, where: str) -> None:
        """A finite lower factor with a positive diagonal."""
        factor, size = self.cholesky, self.layout.num_params
        check_numbers(f"the factor of {where}", factor, (size, size))
        positive = bool((factor.diagonal() > 0).all()) and bool((factor.triu(1) == 0).all())
        check_that(positive, f"a lower factor with a positive diagonal in {where}", "another one")


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
