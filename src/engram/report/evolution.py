"""How sensitivities evolve: groups of examples, sorted by the last update, at several updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engram.report.examples import Array


def group_means(scores: Array, rows: Sequence[int], groups: int) -> list[list[float]]:
    """Mean scores of groups of examples at some updates.

    Args:
        scores: of all examples over time, [U, N]; NaN where they are not known.
        rows: of the updates.
        groups: of examples, from the least to the most sensitive at the last of them.

    Returns:
        The mean of each group, for each update.

    Example:
        >>> group_means(np.array([[3.0, 1.0, 2.0], [0.1, 0.3, 0.2]]), [0, 1], groups=3)
        [[3.0, 2.0, 1.0], [0.1, 0.2, 0.3]]
    """
    last = scores[rows[-1]]
    order = np.argsort(np.where(np.isnan(last), -1.0, last), kind="stable")
    parts = np.array_split(order, min(groups, len(order)))
    return [[_mean(scores[row][part]) for part in parts] for row in rows]


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
