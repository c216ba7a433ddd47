"""Sums of points and of their products, measured from another origin."""

from __future__ import annotations

from torch import Tensor

from engram.parameters import Named


def translated_products(natural: Named, shift: Tensor) -> Named:
    """The components count, sum and outer of the points x + shift; others stay as they are.

    Args:
        natural: with any leading dimensions, as a mixture has them.
        shift: old origin minus new origin, [D].
    """
    count, total = natural["count"][..., None], natural["sum"]
    crossed = total[..., :, None] * shift
    square = count[..., None] * shift[:, None] * shift
    outer = natural["outer"] + crossed + crossed.mT + square
    return {**natural, "sum": total + count * shift, "outer": outer}
