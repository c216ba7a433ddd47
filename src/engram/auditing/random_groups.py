r"""Random groups beside a real one: what leaving out as many examples of the same classes does.

To first order the gain of a removal is a sum over the examples that are left out. Of n examples of
N drawn at random, with :math:`x = n / (1 - n / N)`, it has

.. math:: \text{mean } b \, x, \qquad \text{variance } s^2 x

as the step goes with 1 / (N - n). Both are estimated from a few removals of random groups, of the
sizes that the real ones have. A group is compared with that by Student's distribution; its interval
holds for all groups at once (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_DRAWS = 8  # random groups; each costs as much as a real one, fewer make intervals wide
SURE = 0.95  # that all intervals hold together
COVERED = 1.96  # standard errors either side of a mean: 95 % of a normal distribution


@dataclass(frozen=True, eq=False)
class Gains:
    """What other examples gain by leaving a group out.

    Args:
        each: loss with the group minus without it, NaN for its own examples, [R].
        size: of the group.
        count: of all training examples.
    """

    each: Tensor
    size: int
    count: int

    @property
    def mean(self) -> float:
        """Over those that are not of the group."""
        return float(self.each.nanmean())

    @property
    def reach(self) -> float:
        """How far the removal of the group goes, x."""
        return self.size / (1 - self.size / self.count)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the mean, over examples."""
        error = COVERED * standard_error(self.each)
        return self.mean - error, self.mean + error


@dataclass(frozen=True, eq=False)
class Null:
    """What the removal of random examples does.

    Args:
        slope: b, gain for each unit of reach.
        spread: s, standard deviation for each root of it.
        total: reach of all random groups together.
        each: gain of every example for each unit of reach, [R].
        freedom: random groups less one.
        compared_with: groups that are compared at once.
    """

    slope: float
    spread: float
    total: float
    each: Tensor
    freedom: int
    compared_with: int

    @classmethod
    def of(cls, drawn: Sequence[Gains], compared_with: int) -> Null:
        """From removals of random groups.

        Args:
            drawn: their gains.
            compared_with: real groups.

        Example:
            >>> gains = [Gains(torch.full((50,), 0.01 * n), n, 10**9) for n in (10, 20, 30)]
            >>> round(Null.of(gains, 1).slope, 6), round(Null.of(gains, 1).spread, 6)
            (0.01, 0.0)
        """
        means = torch.tensor([gains.mean for gains in drawn], dtype=torch.float64)
        reach = torch.tensor([gains.reach for gains in drawn], dtype=torch.float64)
        slope = means.sum() / reach.sum()
        freedom = len(drawn) - 1
        spread = ((means - slope * reach).square() / reach).sum() / freedom
        each = torch.stack([gains.each / gains.reach for gains in drawn]).nanmean(0)
        total = float(reach.sum())
        return cls(float(slope), math.sqrt(spread), total, each, freedom, compared_with)

    def compared(self, gains: Gains) -> tuple[float, float, float]:
        """What a group's removal gains beyond that of random ones, its interval's half, and theirs.

        The error has three parts: which examples a random group of this size has, how well the mean
        of such groups is known, and over which examples the gains are seen, paired.
        """
        from scipy.stats import t as student

        expected = self.slope * gains.reach
        paired = standard_error(gains.each - gains.reach * self.each)
        drawn = self.spread**2 * (gains.reach + gains.reach**2 / self.total)
        quantile = student.ppf(1 - (1 - SURE) / 2 / self.compared_with, self.freedom)
        reach = float(quantile) * math.sqrt(drawn + paired**2)
        return gains.mean - expected, reach, expected


def standard_error(values: Tensor) -> float:
    """Of the mean of those that are known; NaN for fewer than two."""
    known = values[values.isfinite()]
    return float(known.std()) / math.sqrt(len(known)) if len(known) > 1 else math.nan


def random_groups(members: Sequence[Tensor], strata: Tensor, seed: int) -> list[Tensor]:
    """Random groups with as many examples of every stratum as real ones have.

    Args:
        members: positions of each real group, the largest first; at least one.
        strata: of every example, [N].
        seed: of the draws.

    Returns:
        Sorted positions: for few groups several draws for each, of many some of all sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-FEWEST_DRAWS // len(members))
    places = torch.linspace(0, len(members) - 1, min(len(members), FEWEST_DRAWS)).round().long()
    like = [members[place] for place in places.tolist()] * rounds
    return [_drawn(own, strata, generator) for own in like]


def _drawn(own: Tensor, strata: Tensor, generator: torch.Generator) -> Tensor:
    parts = []
    for stratum, count in zip(*strata[own].unique(return_counts=True), strict=True):
        among = (strata == stratum).nonzero()[:, 0]
        parts.append(among[torch.randperm(len(among), generator=generator)[: int(count)]])
    return torch.cat(parts).sort().values
