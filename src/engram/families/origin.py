r"""The point that sums of products are measured from.

From an origin o the sum of products of points x with mean c and spread s is of the size
:math:`|c - o|^2`, and what tells of their spread is lost in its rounding when
:math:`|c - o|^2 / s^2` comes near 1e16. So the origin moves into data that are far from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.parameters import Named

FAR = 100.0  # spreads between origin and data: nearer, their squares cost less than four digits


def origin_amid(points: Tensor, weights: Tensor, origin: Tensor) -> Tensor:
    """The origin, [D]; the mean of the points [N, D] where that is far from it for their spread."""
    total = weights.abs().sum()
    if len(points) < 2 or not float(total) > 0:
        return origin
    shares = (weights.abs() / total)[:, None]
    mean = origin + (shares * (points - origin)).sum(0)
    spread = (shares * (points - mean) ** 2).sum(0).sqrt()
    far = ((mean - origin).abs() > FAR * spread).any() & torch.isfinite(mean).all()
    return mean if bool(far) else origin


def translated_products(natural: Named, shift: Tensor, count: Tensor) -> Named:
    """The components sum and outer of the points x + shift; others stay as they are.

    Args:
        natural: with any leading dimensions, as a mixture has them.
        shift: old origin minus new origin, [D].
        count: number of points, of the leading dimensions.
    """
    number, total = count[..., None], natural["sum"]
    crossed = total[..., :, None] * shift
    square = number[..., None] * shift[:, None] * shift
    outer = natural["outer"] + crossed + crossed.mT + square
    return {**natural, "sum": total + number * shift, "outer": outer}
