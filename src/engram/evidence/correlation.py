r"""Agreement of estimates with the truth: Spearman, Pearson and slope, with intervals.

The intervals are meant for samples of six as well as of thirty, with tails as long as those of
losses, where resampling six points is no guide. Correlations r are taken as Fisher's
:math:`z = \operatorname{artanh} r`, whose variance is the larger of the jackknife's and of
:math:`1 / (n - 3)`, for ranks :math:`(1 + r^2 / 2) / (n - 3)`; ranks that all agree count as half a
step away from 1. The slope has the standard error HC3, and as many degrees of freedom as there are
points that decide it.

Reference: Bonett, Wright, *Sample size requirements for estimating Pearson, Kendall and Spearman
correlations*, Psychometrika 2000; MacKinnon, White, *Some heteroskedasticity-consistent covariance
matrix estimators*, Journal of Econometrics 1985.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

COVERED = 0.95  # of the time that an interval holds the truth, about
NORMAL = 1.959964  # standard deviations of a normal distribution that hold this much
SMALLEST_SAMPLE = 3  # examples; correlations of fewer mean nothing
DECIMALS = 12  # of a statistic: beyond, sums of doubles are rounding
NEAREST = 1 - 1e-12  # correlation up to which Fisher's z is a number
MOST_OF_ALL = 0.999  # share of the sum of squares up to which one point leaves a slope to others


@dataclass(frozen=True)
class Interval:
    """A statistic with its 95 % confidence interval; NaN where undefined."""

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


def agreement(estimated: Tensor, true: Tensor) -> Agreement:
    """Correlations and slope.

    Example:
        >>> x = torch.arange(1.0, 7.0)
        >>> found = agreement(x, 2 * x)
        >>> found.spearman.value, found.pearson.value, found.slope.value
        (1.0, 1.0, 2.0)
        >>> found.spearman.low < 0.7
        True
    """
    x, y = estimated.double(), true.double()
    count = len(x)
    step = 12 / (count * (count**2 - 1))  # between neighbouring values of a rank correlation
    ranks = rank_correlation(x, y)
    spread = _fisher_spread(rank_correlation, x, y, 1 + ranks**2 / 2)
    value = float(_correlation(x, y))
    wide = student_quantile(count - 1) * _fisher_spread(_pearson, x, y, 1.0)
    return Agreement(
        _correlation_interval(ranks, NORMAL * spread, step / 2),
        _correlation_interval(value, wide, 0.0),
        _slope(x, y),
    )


def student_quantile(freedom: float) -> float:
    """Of Student's t distribution, at which an interval holds 95 %."""
    from scipy.special import stdtrit  # takes a while to load, and few need it

    return float(stdtrit(freedom, (1 + COVERED) / 2))


def rank_correlation(estimated: Tensor, true: Tensor) -> float:
    """Spearman's correlation; NaN where one of them does not differ."""
    return _pearson(_ranks(estimated.double()), _ranks(true.double()))


def _pearson(x: Tensor, y: Tensor) -> float:
    return float(_correlation(x, y))


def _ranks(values: Tensor) -> Tensor:
    """Equal values share their mean rank."""
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return below.double() + 0.5 * (equal.double() + 1)


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / (x.norm() * y.norm())


def _fisher(value: float) -> float:
    return math.atanh(min(max(value, -NEAREST), NEAREST))


def _fisher_spread(
    statistic: Callable[[Tensor, Tensor], float], x: Tensor, y: Tensor, scale: float
) -> float:
    """Standard error of Fisher's z of a correlation: by the jackknife, and no less than normal.

    Args:
        statistic: the correlation.
        x, y: values, [n].
        scale: n - 3 times the variance of z where x and y are normal.
    """
    count = len(x)
    if count <= SMALLEST_SAMPLE:
        return math.inf
    others = [torch.arange(count) != left_out for left_out in range(count)]
    z = torch.tensor([_fisher(statistic(x[rest], y[rest])) for rest in others])
    jackknife = float((z - z.mean()).square().sum()) * (count - 1) / count
    normal = scale / (count - SMALLEST_SAMPLE)
    return math.sqrt(max(jackknife, normal)) if jackknife >= 0 else math.inf


def _correlation_interval(value: float, half: float, step: float) -> Interval:
    """An interval of Fisher's z as one of the correlation."""
    if math.isnan(value):
        return Interval(math.nan, math.nan, math.nan)
    low, high = _fisher(value - step) - half, _fisher(value + step) + half
    exact = round(value, DECIMALS)
    return Interval(exact, min(math.tanh(low), exact), max(math.tanh(high), exact))


def _slope(x: Tensor, y: Tensor) -> Interval:
    """Of the line through the origin, with the standard error HC3."""
    squares = x.square().sum()
    slope, leverage = float((x * y).sum() / squares), x.square() / squares
    if not math.isfinite(slope):
        return Interval(math.nan, math.nan, math.nan)
    left = (y - slope * x) / (1 - leverage.clamp(max=MOST_OF_ALL))
    error = float((x * left).norm() / squares)
    half = student_quantile(max(1.0, 1 / float(leverage.square().sum()))) * error
    return Interval(round(slope, DECIMALS), slope - half, slope + half)
