r"""Linear systems of many copies with one Hessian, solved together.

.. math:: H x_c = r_c

Every direction whose image H s is known serves all copies: a copy's solution is the combination
that leaves the least residual (block generalised conjugate residuals). A round looks only where the
copies' residuals, in units of what is wanted of each, are largest together, so that what many of
them need is bought once. Directions are kept for later right-hand sides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engram.core.dtypes import eigh, wide, widest

Apply = Callable[[Tensor], Tensor]
# Which directions are worth a product with H: more serve sooner, fewer are shared by more systems
WIDTH = 16  # directions a round, at most (8 and 32 take the same time for 100 copies of an MLP)
SMALLEST_PART = 0.5  # of the residuals, in units of what is wanted, that is worth a direction
LEFT_WAITING = 0.1  # of the systems, which wait for others that need the same next time
# From where on rounding would show, in shares of what a number was
NOTHING_NEW = 1e-4  # of an image outside all others, below which it counts as none
CANCELLED = 0.1  # of an image outside all others, below which it is made orthogonal twice
STALE = 0.01  # of the sums of squares since they were last summed, below which they are again


class _Residuals:
    """Rows [A, P] and their inner products, which are not summed again for each change.

    Args:
        rows: what is left so far; changed in place.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._sum()

    def _sum(self) -> None:
        self.products = wide(self.rows @ self.rows.mT)
        self.summed = self.products.diagonal().clone()

    def leave(self, images: Tensor) -> Tensor:
        """Take the parts along orthonormal images [W, P] away; the parts, [A, W]."""
        parts = self.rows @ images.mT
        self.rows.addmm_(parts, images, alpha=-1.0)
        self.products -= wide(parts) @ wide(parts).mT
        if self.products.diagonal().max() < STALE * self.summed.max():
            self._sum()
        return parts


class BlockGCR:
    """Directions and their images, the images orthonormal.

    Args:
        precondition: applies an approximate inverse of H to rows [A, P].
        multiply: H v for rows [A, P].
        like: rows of the same length, type and device.
        capacity: at most so many directions.
    """

    def __init__(self, precondition: Apply, multiply: Apply, like: Tensor, capacity: int) -> None:
        self.precondition, self.multiply = precondition, multiply
        self.count = 0
        self.directions = like.new_empty(capacity, like.shape[1])
        self.images = torch.empty_like(self.directions)
        # row j combines directions into the one whose image is images[j]
        self.combine = like.new_zeros(capacity, capacity, dtype=widest(like.device))

    @property
    def full(self) -> bool:
        """Whether there is no place for another direction."""
        return self.count == len(self.directions)

    def solve(self, right: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """x, about H^-1 r for rows [A, P], and what it leaves, r - H x.

        Known directions serve first; new ones are added until each row leaves less than its goal
        [A], but for the last few rows and where capacity is full.
        """
        residuals = _Residuals(right.clone())
        parts = [residuals.leave(self.images[: self.count])]
        allowed = wide(goals).square()
        while not self.full:
            waiting = residuals.products.diagonal() > allowed
            if int(waiting.sum()) <= LEFT_WAITING * len(right):
                break
            new = self._grow(residuals, waiting, wide(goals))
            if new == 0:
                break
            parts.append(residuals.leave(self.images[self.count - new : self.count]))
        return self._combined(torch.cat(parts, dim=1)), residuals.rows

    def _combined(self, parts: Tensor) -> Tensor:
        """Directions with these parts [A, S] along their images."""
        weights = wide(parts) @ self.combine[: self.count, : self.count]
        return weights.to(parts.dtype) @ self.directions[: self.count]

    def _grow(self, residuals: _Residuals, waiting: Tensor, goals: Tensor) -> int:
        """Directions where the waiting residuals are largest together; how many are new."""
        chosen = waiting.nonzero()[:, 0]
        units = 1.0 / goals[chosen]
        values, vectors = eigh(residuals.products[chosen][:, chosen] * torch.outer(units, units))
        room = min(WIDTH, len(self.directions) - self.count)
        scale = float((residuals.summed[chosen] * units.square()).sum())
        rounding = torch.finfo(residuals.rows.dtype).eps * scale
        found = int((values > max(SMALLEST_PART**2, rounding)).sum())
        wanted = max(1, min(room, found))
        shares = goals.new_zeros(wanted, len(goals))
        shares[:, chosen] = vectors[:, -wanted:].mT * units
        directions = self.precondition(shares.to(residuals.rows.dtype) @ residuals.rows)
        directions /= directions.norm(dim=1, keepdim=True)
        return self._add(directions, self.multiply(directions))

    def _add(self, directions: Tensor, images: Tensor) -> int:
        """What is new in these directions and images, [A, P] each; how many that is."""
        known, combine = self.images[: self.count], self.combine[: self.count, : self.count]
        before = images.norm(dim=1)
        inside = images @ known.mT
        images = torch.addmm(images, inside, known, alpha=-1.0)
        share = images.norm(dim=1) / before
        poor = share < CANCELLED
        if bool(poor.any()):
            again = images[poor] @ known.mT
            images[poor] -= again @ known
            inside[poor] += again
            share = images.norm(dim=1) / before
        good = share > NOTHING_NEW
        if not good.any():
            return 0
        turn = _orthonormalising(images[good])
        old, new = self.count, self.count + len(turn)
        short = turn.to(images.dtype)
        self.directions[old:new] = short @ directions[good]
        self.images[old:new] = short @ images[good]
        self.combine[old:new, :old] = -(turn @ wide(inside[good])) @ combine
        self.combine[range(old, new), range(old, new)] = 1.0
        self.count = new
        return new - old


def _orthonormalising(rows: Tensor) -> Tensor:
    """T with T rows orthonormal, [K, A]; what rows have in common counts once."""
    inverse = 1.0 / wide(rows.norm(dim=1))
    unit = rows * inverse[:, None].to(rows.dtype)
    values, vectors = eigh(unit @ unit.mT)
    kept = values > NOTHING_NEW * values[-1]
    return (vectors[:, kept] * values[kept].rsqrt()).mT * inverse
