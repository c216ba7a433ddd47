r"""A precision that is known in some directions, and isotropic in all others.

With the precision S known on the span of orthonormal columns U, as its part inside,
:math:`U' S U = A` (diagonal), and its part outside, :math:`E = (I - U U') S U`, the block is

.. math:: \tilde S = S U A^{-1} U' S + \rho\,(I - U U')

It agrees with S on the span, and outside holds what the span implies plus :math:`\rho`. It is
positive definite where A is, and inverts in closed form by eliminating the outside first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from engram.core.dtypes import wide
from engram.core.errors import PosteriorError
from engram.core.parameters import Layout, Named


def check_definite(lowest: float) -> None:
    """PosteriorError unless the smallest eigenvalue that was found is positive."""
    if not lowest > 0:
        raise PosteriorError(
            "a positive-definite precision",
            f"a matrix whose smallest eigenvalue is {lowest:.3g} or below",
            'train to a minimum, raise prior_precision, or use curvature="ggn"',
        )


@dataclass(frozen=True)
class LowRankBlock:
    """Precision over its parameters from r directions and what it makes of them.

    Args:
        layout: the parameters, with their shapes.
        basis: U, orthonormal columns, [P, r].
        inside: diagonal of A = U' S U, [r].
        outside: E, what S makes of the basis outside its span, [P, r].
        rest: rho, of directions outside.
    """

    layout: Layout
    basis: Tensor
    inside: Tensor
    outside: Tensor
    rest: float

    def __post_init__(self) -> None:
        lowest = float(self.inside.min()) if len(self.inside) else self.rest
        check_definite(min(lowest, self.rest))

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters in this block."""
        return self.layout.names

    @property
    def rank(self) -> int:
        """r, directions in which the precision is known."""
        return self.basis.shape[1]

    def rows(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """[..., *shape] per name -> [M, P] in the block's own type."""
        flat = self.layout.flatten(vectors)
        return flat.reshape(-1, flat.shape[-1]).to(self.basis)

    def _named(self, rows: Tensor, like: Mapping[str, Tensor]) -> Named:
        first = like[self.names[0]]
        lead = first.shape[: first.dim() - len(self.layout.shapes[0])]
        return self.layout.unflatten(rows.reshape(*lead, rows.shape[-1]).to(first))

    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1 v, batched over leading dimensions."""
        rows = self.rows(vectors)
        kept = rows @ self.basis
        known = kept / self.inside
        beyond = (rows - kept @ self.basis.mT - known @ self.outside.mT) / self.rest
        known = known - (beyond @ self.outside) / self.inside
        return self._named(known @ self.basis.mT + beyond, vectors)

    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """S v."""
        rows = self.rows(vectors)
        kept = rows @ self.basis
        beyond = rows - kept @ self.basis.mT
        known = kept + (beyond @ self.outside) / self.inside
        image = (known * self.inside) @ self.basis.mT + known @ self.outside.mT
        return self._named(image + self.rest * beyond, vectors)

    def inner_products(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """<v_r, S^-1 v_s> for [..., R, *shape], as [..., R, R]; no step is built."""
        flat = self.layout.flatten(vectors).to(self.basis)
        kept = flat @ self.basis
        known = kept / self.inside
        within = known @ kept.mT
        if self.rest == math.inf:
            return within.to(vectors[self.names[0]])
        # of what is outside, v - U U'v - E A^-1 U'v, without building it
        mixed = (flat @ self.outside) @ known.mT
        beyond = flat @ flat.mT - kept @ kept.mT - mixed - mixed.mT
        beyond = beyond + (known @ self._outside_square) @ known.mT
        return (within + beyond / self.rest).to(vectors[self.names[0]])

    @cached_property
    def _outside_square(self) -> Tensor:
        """E'E, [r, r]."""
        return self.outside.mT @ self.outside

    def root_solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """R v with R R' = S^-1: turns white noise into samples."""
        rows = self.rows(vectors)
        kept = rows @ self.basis
        beyond = (rows - kept @ self.basis.mT) / self.rest**0.5
        known = kept * self.inside.rsqrt() - (beyond @ self.outside) / self.inside
        return self._named(known @ self.basis.mT + beyond, vectors)

    def log_det(self) -> float:
        """log |S|."""
        beyond = (self.layout.num_params - self.rank) * math.log(self.rest)
        return float(wide(self.inside).log().sum()) + beyond

    def only_kept(self) -> LowRankBlock:
        """The same block with nothing that can move outside the kept directions."""
        return replace(self, rest=math.inf)

    def scaled(self, scale: float) -> LowRankBlock:
        """The same block, times a number."""
        return LowRankBlock(
            self.layout, self.basis, scale * self.inside, scale * self.outside, scale * self.rest
        )
