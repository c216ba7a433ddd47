"""Agreement of estimates with the truth: Spearman, Pearson and slope, with bootstrap intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 2000  # bootstrap draws: steadier intervals against time
COVERED = 0.95  # share of the bootstrap values that an interval holds
SMALLEST_SAMPLE = 3  # examples; correlations of fewer mean nothing
DECIMALS = 12  # of a statistic: beyond, sums of doubles are rounding


@dataclass(frozen=True)
class Interval:
    """A statistic with the range that holds 95 % of its bootstrap values; NaN where undefined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Agreement:
    """Correlations and slope between estimated and true values.

    Args:
        spearman: correlation of the ranks.
        pearson: correlation of the values.
        slope: of the line through the origin, true over estimated: 1 where the size is right,
            below 1 where the estimate is too large.
    """

    spearman: Interval
    pearson: Interval
    slope: Interval


def agreement(estimated: Tensor, true: Tensor, strata: Tensor, seed: int) -> Agreement:
    """Correlations and slope; the bootstrap draws within strata, as the sample was drawn.

    Example:
        >>> x = torch.arange(1.0, 7.0)
        >>> found = agreement(x, 2 * x, torch.zeros(6, dtype=torch.long), seed=0)
        >>> found.spearman.value, found.pearson.value, found.slope.value
        (1.0, 1.0, 2.0)
    """
    rows = torch.cat([torch.arange(len(true))[None], _resampled(strata, seed)])
    x, y = estimated.double()[rows], true.double()[rows]
    return Agreement(
        _interval(_correlation(_ranks(x), _ranks(y))),
        _interval(_correlation(x, y)),
        _interval((x * y).sum(1) / (x * x).sum(1)),
    )


def rank_correlation(estimated: Tensor, true: Tensor) -> float:
    """Spearman's correlation; NaN where one of them does not differ."""
    return float(_correlation(_ranks(estimated.double()[None]), _ranks(true.double()[None])))


def _resampled(strata: Tensor, seed: int) -> Tensor:
    """Positions drawn with replacement inside each stratum, [RESAMPLES, n]."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for stratum in strata.unique():
        own = (strata == stratum).nonzero()[:, 0]
        drawn = torch.randint(len(own), (RESAMPLES, len(own)), generator=generator)
        parts.append(own[drawn])
    return torch.cat(parts, dim=1)


def _ranks(values: Tensor) -> Tensor:
    """Ranks in every row; equal values share their mean rank."""
    below = (values[:, :, None] > values[:, None, :]).sum(2)
    equal = (values[:, :, None] == values[:, None, :]).sum(2)
    return below.double() + 0.5 * (equal.double() + 1)


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    return (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))


def _interval(values: Tensor) -> Interval:
    """The first value is the statistic, the others its bootstrap; undefined draws are left out."""
    drawn = values[1:][torch.isfinite(values[1:])]
    if len(drawn) == 0 or not math.isfinite(float(values[0])):
        return Interval(math.nan, math.nan, math.nan)
    tail = torch.tensor([(1 - COVERED) / 2, (1 + COVERED) / 2], dtype=torch.float64)
    low, high = drawn.quantile(tail).tolist()
    return Interval(round(float(values[0]), DECIMALS), low, high)
