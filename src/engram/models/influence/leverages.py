"""What is left of an example's information when it goes."""

from __future__ import annotations

from torch import Tensor

from engram.errors import PosteriorError


def remaining(leverage: Tensor) -> Tensor:
    """1 - h, or PosteriorError where nothing remains."""
    left = 1 - leverage
    if float(left.min()) < 1e-10:
        which = (left < 1e-10).nonzero()[:, 0].tolist()
        raise PosteriorError(
            "examples that can be left out one at a time",
            f"{len(which)} of leverage 1 (first: {which[:5]}), which alone determine some "
            "combination of columns",
            "drop them with the columns they determine, or use penalty > 0",
        )
    return left
