"""Rank correlation of two columns."""

from __future__ import annotations

import math

from torch import Tensor

from engram.core.dtypes import wide

FEWEST = 3  # correlations of fewer values mean nothing


def rank_correlation(left: Tensor, right: Tensor) -> float:
    """Spearman's correlation of two columns [N]; NaN where fewer than three rows are finite.

    Equal values are ranked in their order, which makes no difference for losses.

    Example:
        >>> import torch
        >>> rank_correlation(torch.tensor([1.0, 2.0, 30.0]), torch.tensor([0.1, 0.2, 0.3]))
        1.0
    """
    fine = left.isfinite() & right.isfinite()
    if int(fine.sum()) < FEWEST:
        return math.nan
    ranks = (column[fine].argsort(stable=True).argsort().to(column) for column in (left, right))
    x, y = map(wide, ranks)
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()))
