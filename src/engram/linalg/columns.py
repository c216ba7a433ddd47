"""Columns of a weight matrix that acts at several positions, ready for an eigenbasis."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """Columns at several positions, and the same in the eigenbasis where they were turned.

    Args:
        plain: [B, T, I], without the constant 1 of a bias.
        turned: [B, T, I] with it.
    """

    plain: Tensor
    turned: Tensor | None

    @property
    def positions(self) -> int:
        """T."""
        return self.plain.shape[1]
