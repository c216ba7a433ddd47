r"""The difference estimator: a mean over all N, known to a guess, corrected by the truth of some.

.. math:: \bar y = \frac{1}{N} \sum_i \hat y_i + \frac{1}{m} \sum_k \frac{y_k - \hat y_k}{N p_k}

is right on average whatever the guesses :math:`\hat y` are; the better, the less it varies.
Examples are drawn with replacement, with a probability p in proportion to a size, m / H of them
from each of H strata that hold equal shares of all sizes, the small ones in the first.

Reference: Särndal, Swensson, Wretman, *Model Assisted Survey Sampling*, 1992, chapters 2 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.evidence.correlation import Interval, student_quantile

# Share of the mean size that every example has at least: those with a tiny estimate can be drawn
# too, and count at most six times as much as one drawn at random. More of it widens the intervals
# of good estimates, less leaves those of bad ones without the examples that they miss
FLOOR = 0.2


@dataclass(frozen=True, eq=False)
class Draws:
    """Examples drawn by size.

    Args:
        positions: of each draw; the same one may come twice, [m].
        weights: c / (sum(c) p) of each draw, where a row stands for c examples, [m].
        strata: that each draw is from, [m].
    """

    positions: Tensor
    weights: Tensor
    strata: Tensor


def drawn(sizes: Tensor, counts: Tensor, draws: int, strata: int, seed: int) -> Draws:
    """Draw by size.

    Args:
        sizes: not negative, [N].
        counts: how many examples a row stands for, [N].
        draws: m.
        strata: H.
        seed: of the draws.

    Example:
        >>> found = drawn(torch.tensor([0.0, 1.0, 3.0]), torch.ones(3), 8, 2, seed=0)
        >>> found.strata
        tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """
    size = sizes.double()
    total = float((counts * size).sum() / counts.sum())
    size = size + FLOOR * total if total > 0 else torch.ones_like(size)
    order = size.argsort(stable=True)
    edges = (counts * size)[order].cumsum(0)
    whole = float(edges[-1])
    generator = torch.Generator().manual_seed(seed)
    stratum = torch.arange(draws) * strata // draws
    places = (stratum + torch.rand(draws, generator=generator, dtype=torch.float64)) / strata
    found = torch.searchsorted(edges, whole * places, right=True).clamp(max=len(size) - 1)
    positions = order[found]
    weights = whole / (counts.sum() * size[positions])
    return Draws(positions, weights, stratum)


@dataclass(frozen=True)
class Estimated:
    """A mean with its standard error, and the degrees of freedom that it is known with."""

    value: float
    error: float
    freedom: int

    def interval(self) -> Interval:
        """The value with its t interval."""
        half = student_quantile(self.freedom) * self.error
        return Interval(self.value, self.value - half, self.value + half)


def corrected_mean(guess: float, errors: Tensor, draws: Draws, least: float = 0.0) -> Estimated:
    """The mean of the guesses, corrected by what they were off by.

    The standard error counts one more draw, as far off as the farthest: with long tails the
    largest ones are mostly not among the draws, and a plain t interval covers less than it says.

    Args:
        guess: mean of the guesses over all examples.
        errors: truth minus guess of each draw, [m].
        draws: that they are of.
        least: that one more draw is off by, however near all others are.

    Example:
        >>> draws = drawn(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), 8, 2, seed=0)
        >>> off = torch.tensor([0.14, 0.24, 0.34])  # in proportion to the sizes with their floor
        >>> found = corrected_mean(1.0, off[draws.positions], draws)
        >>> round(found.value, 4), round(found.error, 4), found.freedom
        (1.24, 0.0, 6)
    """
    scaled = draws.weights * errors.double()
    number = int(draws.strata.max()) + 1
    parts = [scaled[draws.strata == h] for h in range(number)]
    shift = torch.stack([part.mean() for part in parts]).mean()
    variance = torch.stack([part.var() / len(part) for part in parts]).sum() / number**2
    farthest = (scaled - shift).abs().max().clamp(min=least) / len(scaled)
    error = float((variance + farthest.square()).sqrt())
    return Estimated(guess + float(shift), error, len(scaled) - number)
