r"""What steps say about the curvature: pairs (s, y = H s), of one copy or of all of them together.

Copies of one model that differ in a few left-out examples share nearly the same Hessian, so that
every step of each tells all the others something: with C copies the pairs span C dimensions more
after every round, as in a block Krylov method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Apply = Callable[[Tensor], Tensor]
SMALLEST_SHARE = 50.0  # of a pair's curvature that is new, in roundings; less is noise
ROUNDS = 10  # of block conjugate gradients


@dataclass(frozen=True)
class Base:
    """An inverse Hessian that copies start from.

    Args:
        apply: to rows [A, P].
        exact: whether it is to be taken at its word; otherwise each copy's last pair scales it,
            and without curvature at all (``known=False``) the first step is no longer than 1.
    """

    apply: Apply
    exact: bool
    known: bool = True


IDENTITY = Base(torch.clone, exact=False, known=False)


class OwnPairs:
    """The last pairs of each copy: limited-memory BFGS on top of any inverse Hessian.

    Args:
        start: parameters of the copies, [C, P].
        depth: pairs kept.
    """

    def __init__(self, start: Tensor, depth: int) -> None:
        copies = len(start)
        self.depth = depth
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.copies = copies
        self.scale = start.new_zeros(copies)  # of the base for each copy; 0 while unknown

    def add(self, rows: Tensor, steps: Tensor, changes: Tensor) -> None:
        """Pairs of the copies ``rows``; a pair without positive curvature counts as none."""
        product = (steps * changes).sum(1)
        norms = steps.norm(dim=1) * changes.norm(dim=1)
        good = product > 1e-8 * norms
        inverse = torch.where(good, 1.0 / torch.where(good, product, 1.0), 0.0)
        full_steps = steps.new_zeros(self.copies, steps.shape[1])
        full_changes, full_inverse = torch.zeros_like(full_steps), steps.new_zeros(self.copies)
        full_steps[rows], full_changes[rows], full_inverse[rows] = steps, changes, inverse
        self.pairs = [*self.pairs[-self.depth + 1 :], (full_steps, full_changes, full_inverse)]

    def rescale(self, rows: Tensor, base: Apply) -> None:
        """Let the last pair of these copies set the size of the base, s'y / y'B0^-1 y."""
        steps, changes, inverse = (part[rows] for part in self.pairs[-1])
        product, squares = (steps * changes).sum(1), (changes * base(changes)).sum(1)
        good = (inverse > 0) & (squares > 0)
        ratio = product / torch.where(good, squares, 1.0)
        self.scale[rows] = torch.where(good, ratio, self.scale[rows])

    def apply(self, rows: Tensor, vectors: Tensor, base: Apply) -> Tensor:
        """The two-loop recursion around ``base`` for the copies ``rows``, [A, P]."""
        result, weights = vectors.clone(), []
        picked = [(s[rows], y[rows], r[rows]) for s, y, r in self.pairs]
        for step, change, inverse in reversed(picked):
            weight = inverse * (step * result).sum(1)
            result -= weight[:, None] * change
            weights.append(weight)
        result = base(result)
        for (step, change, inverse), weight in zip(picked, reversed(weights), strict=True):
            result += (weight - inverse * (change * result).sum(1))[:, None] * step
        return result


class SharedPairs:
    r"""Directions with known curvature, conjugate: :math:`\hat S \hat Y' = I`, around a posterior.

    .. math:: B^{-1} = (I - \hat S'\hat Y)\, c B_0^{-1} (I - \hat Y'\hat S) + \hat S'\hat S

    Args:
        base: applies the inverse precision :math:`B_0^{-1}` to rows [A, P].
        like: rows of the same length, type and device.
    """

    def __init__(self, base: Apply, like: Tensor) -> None:
        self.base = base
        self.scale = 1.0  # c: by how much the base is right in what the directions do not span
        self.steps = like.new_zeros(0, like.shape[1])
        self.changes = self.steps

    @classmethod
    def found_by(cls, base: Apply, multiply: Apply, right: Tensor, targets: Tensor) -> SharedPairs:
        """Block conjugate gradients for H X = right, [C, P]; every direction serves every copy.

        Args:
            base: the preconditioner.
            multiply: H v for rows [A, P].
            right: one right-hand side per copy.
            targets: residual norms at which to stop, [C].
        """
        pairs, residual = cls(base, right), right.clone()
        for _ in range(ROUNDS):
            norms = residual.double().norm(dim=1)
            open_rows = norms > targets
            if not open_rows.any():
                break
            direction = base(residual[open_rows] / norms[open_rows, None].to(residual.dtype))
            image = multiply(direction)
            product = float((direction * image).double().sum())
            along = (direction * residual[open_rows]).double().sum(1)
            aligned = float((along / norms[open_rows]).sum())
            if product > 0:
                pairs.scale = min(max(aligned / product, 0.1), 1.0)
            new = pairs.add(direction, image)
            if new == 0:
                break
            residual -= (residual @ pairs.steps[-new:].mT) @ pairs.changes[-new:]
        return pairs

    def add(self, steps: Tensor, changes: Tensor) -> int:
        """What is new in these pairs, [A, P] each; how many directions that is."""
        product = (steps * changes).sum(1)
        good = product > 1e-6 * steps.norm(dim=1) * changes.norm(dim=1)
        if not good.any():
            return 0
        scale = product[good].rsqrt()[:, None]
        new_steps, new_changes = steps[good] * scale, changes[good] * scale
        known = new_steps @ self.changes.mT
        new_steps = new_steps - known @ self.steps
        new_changes = new_changes - known @ self.changes
        gram = new_steps.double() @ new_changes.double().mT
        values, vectors = torch.linalg.eigh(0.5 * (gram + gram.mT))
        kept = values > max(1e-10, SMALLEST_SHARE * torch.finfo(steps.dtype).eps)
        turn = (vectors[:, kept] * values[kept].rsqrt()).mT.to(steps.dtype)
        self.steps = torch.cat([self.steps, turn @ new_steps])
        self.changes = torch.cat([self.changes, turn @ new_changes])
        return int(kept.sum())

    def apply(self, vectors: Tensor) -> Tensor:
        """B^-1 v, [A, P]."""
        inside = vectors @ self.steps.mT
        outside = self.scale * self.base(vectors - inside @ self.changes)
        return outside + (inside - outside @ self.changes.mT) @ self.steps
