r"""A precision that is known in some directions, and isotropic in all others.

With the precision S known on the span of orthonormal columns U, as its part inside,
:math:`U' S U = A` (diagonal), and its part outside, :math:`E = (I - U U') S U`, the block is

.. math:: \tilde S = S U A^{-1} U' S + \rho\,(I - U U')

It agrees with S on the span, and outside holds what the span implies plus :math:`\rho`. It is
positive definite where A is, and inverts in closed form by eliminating the outside first.

A part :math:`H_m` of S, an example's own, is taken out of what is known, and :math:`\rho` stays:

.. math:: A_m = A - U' H_m U, \qquad E_m = E - (I - U U') H_m U

.. math:: \tilde S_m = \begin{pmatrix} A_m & E_m' \\ E_m & \rho + E_m A_m^{-1} E_m' \end{pmatrix}

So what is taken out was put in: of the example's curvature outside U nothing is known to be in
the precision. Systems with :math:`A_m` are solved by conjugate gradients preconditioned with A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import Layout, Named
from engram.core.storage.kinds import check_numbers, check_that
from engram.errors import PosteriorError
from engram.linalg.block import Block
from engram.linalg.cg import ApplyTo, Limits, Solution, conjugate_gradients

# Relative residual of the second solve, for what the outside gives back: a small part of the step,
# which need not be known better
CORRECTION = 3e-2


def check_definite(lowest: float) -> None:
    """PosteriorError unless the smallest eigenvalue that was found is positive."""
    if not lowest > 0:
        raise PosteriorError(
            "a positive-definite precision",
            f"a matrix whose smallest eigenvalue is {lowest:.3g} or below",
            'train to a minimum, raise prior_precision, or use curvature="ggn"',
        )


@dataclass(frozen=True)
class LowRankBlock(Block):
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
    couples_all: ClassVar[bool] = True
    is_partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        lowest = float(self.inside.min()) if len(self.inside) else self.rest
        check_definite(min(lowest, self.rest))

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

    def with_prior(
        self, prior: Mapping[str, Tensor], base: float, tolerance: float = 0.0
    ) -> LowRankBlock:
        """The mean over all entries: outside its directions it can hold no other."""
        added = float(wide(self.layout.flatten(prior)).mean()) - base
        return replace(self, inside=self.inside + added, rest=self.rest + added)

    def check(self, where: str) -> None:
        """A finite rest, and a finite basis with its images."""
        inside, size = self.inside, self.layout.num_params
        check_that(inside.dim() == 1, f"inside [r] in {where}", f"{list(inside.shape)}")
        check_numbers(f"inside of {where}", inside)
        check_that(0 < self.rest < math.inf, f"a finite rest in {where}", f"{self.rest}")
        for name in ("basis", "outside"):
            check_numbers(f"{name} of {where}", getattr(self, name), (size, len(inside)))

    def in_own_type(self, rows: Tensor) -> Tensor:
        """In single precision, but for small models."""
        return rows.to(self.basis)

    def solve_without(self, own: ApplyTo, right: Tensor, limits: Limits) -> Solution:
        """(S - H_m)^-1 b_m for every row of b [M, P], with H_m taken out where S is known."""
        everyone = torch.arange(len(right), device=right.device)

        def within(coordinates: Tensor, limits: Limits) -> Solution:
            """A_m y = b, in coordinates of the kept directions."""

            def times(vectors: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
                return whole - own(vectors @ self.basis.mT, rows) @ self.basis

            return conjugate_gradients(times, coordinates, limits, lambda rows: rows / self.inside)

        first = within(right @ self.basis, limits)
        inside = first.vectors @ self.basis.mT
        known = right + own(inside, everyone)
        known = known - (known @ self.basis) @ self.basis.mT
        beyond = (known - first.vectors @ self.outside.mT) / self.rest
        back = own(beyond, everyone) @ self.basis - beyond @ self.outside
        second = within(back, replace(limits, tolerance=CORRECTION))
        return replace(
            first,
            vectors=inside + second.vectors @ self.basis.mT + beyond,
            indefinite=first.indefinite | second.indefinite,
            iterations=first.iterations + second.iterations,
        )
