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

from engram.precision import eigh, wide, widest

Apply = Callable[[Tensor], Tensor]
WIDTH = 16  # directions a round
SMALLEST_PART = 0.5  # of the residuals, in units of what is wanted, that is worth a direction
NOTHING_NEW = 1e-4  # share of an image outside all others, below which it is rounding
LEFT_WAITING = 0.1  # of the systems, which wait for others that need the same next time
CANCELLED = 0.1  # share outside all others, below which it is made orthogonal twice


class SharedInverse:
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

        It leaves less than ``goals`` [A], but in the last few rows and where capacity is full.
        """
        weights = right @ self.images[: self.count].mT
        residual = right - weights @ self.images[: self.count]
        parts = [weights]
        while not self.full:
            waiting = residual.norm(dim=1) > goals
            if int(waiting.sum()) <= LEFT_WAITING * len(right):
                break
            new = self._grow(residual[waiting] / goals[waiting, None])
            if new == 0:
                break
            images = self.images[self.count - new : self.count]
            parts.append(residual @ images.mT)
            residual -= parts[-1] @ images
        weights = wide(torch.cat(parts, dim=1)) @ self.combine[: self.count, : self.count]
        return weights.to(right.dtype) @ self.directions[: self.count], residual

    def _grow(self, residual: Tensor) -> int:
        """Directions where these residuals are largest together; how many are new."""
        values, vectors = eigh(residual @ residual.mT)
        room = min(WIDTH, len(self.directions) - self.count)
        rounding = len(values) * torch.finfo(residual.dtype).eps * float(values[-1])
        found = int((values > max(SMALLEST_PART**2, rounding)).sum())
        wanted = max(1, min(room, found))
        directions = self.precondition(vectors[:, -wanted:].mT.to(residual.dtype) @ residual)
        directions /= directions.norm(dim=1, keepdim=True)
        return self._add(directions, self.multiply(directions))

    def _add(self, directions: Tensor, images: Tensor) -> int:
        """What is new in these directions and images, [A, P] each; how many that is."""
        known, combine = self.images[: self.count], self.combine[: self.count, : self.count]
        before = images.norm(dim=1)
        inside = images @ known.mT
        images = images - inside @ known
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
