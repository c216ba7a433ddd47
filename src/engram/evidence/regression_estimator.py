"""The regression estimator of survey sampling: the mean over all data from that of a few."""

from __future__ import annotations

import math

from torch import Tensor


def increase_of_all(increase: Tensor, difficulty: Tensor, difficulty_of_all: float) -> float:
    r"""The mean increase over all data, from that of a few examples.

    .. math:: \bar d + \beta\, (\bar h_{\mathrm{all}} - \bar h), \qquad
        \beta = \mathrm{cov}(d_i, h_i) / \mathrm{var}(h_i)

    An example that took long to learn is one that is got wrong when it is left out. So by how much
    the few happen to be easier than all data, whose mean is known, can be taken out.

    Args:
        increase: d of the few, [m].
        difficulty: h of the few, [m]: the mean of an example's loss over the training so far.
        difficulty_of_all: its mean over all data.

    Example:
        >>> import torch
        >>> difficulty = torch.tensor([0.1, 0.3, 0.5])
        >>> round(increase_of_all(2 * difficulty, difficulty, 0.4), 6)
        0.8
    """
    slope = _slope(increase, difficulty)
    return float(increase.mean()) + slope * (difficulty_of_all - float(difficulty.mean()))


def standard_error(increase: Tensor, difficulty: Tensor) -> float:
    """Of :func:`increase_of_all`: what the regression leaves, over the root of m; NaN below 3."""
    count = len(increase)
    if count < 3:
        return math.nan
    centred = difficulty - difficulty.mean()
    left = increase - increase.mean() - _slope(increase, difficulty) * centred
    return math.sqrt(float(left.square().sum()) / (count - 2) / count)


def _slope(increase: Tensor, difficulty: Tensor) -> float:
    centred = difficulty - difficulty.mean()
    spread = float(centred.square().sum())
    return float((increase * centred).sum()) / spread if spread > 0 else 0.0
