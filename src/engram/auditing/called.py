r"""How many of the labels that are called wrong are wrong, as far as one can know.

Each label that is called wrong has a chance of being so. Their mean is what a fitted model says of
itself: on few labels it says 100 % where 89 % are, on others 56 % where 94 % are. So it counts as
so many looks at labels, and no more, and half a right label is taken for seen:

.. math:: \text{share} \sim \text{Beta}(\nu \bar p,\ \nu (1 - \bar p) + \tfrac12), \qquad
    \nu = \frac{n \, \nu_\infty}{n + \nu_\infty}

The number of wrong ones among n is then beta-binomial.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Looks at a label that the fitted model's own chances are worth, however many labels are called: by
# maximum likelihood on 145 runs of 19 sets (`python -m benchmarks.audit.sureness`)
WORTH = 14.0
RIGHT = 0.5  # right labels among those that are called wrong, taken for seen
COVERED = 0.9  # chance that the interval has the true number
SMALLEST = 1e-3  # parameter of a Beta distribution: 0 is none


@dataclass(frozen=True)
class Called:
    """Labels that are called wrong, and how many of them are.

    Args:
        count: labels that are called wrong.
        share: of them, expected to be wrong; NaN where none is called.
        low, high: how many of them are wrong, with a chance of 90 %.
    """

    count: int
    share: float
    low: int
    high: int

    @classmethod
    def by(cls, chances: Tensor) -> Called:
        """From the chance of each label that is called wrong, [n].

        Example:
            >>> import torch
            >>> Called.by(torch.full((47,), 0.999))
            Called(count=47, share=0.9547, low=38, high=47)
        """
        from scipy.stats import betabinom

        count = len(chances)
        if not count:
            return cls(0, float("nan"), 0, 0)
        mean, worth = float(chances.double().mean()), count * WORTH / (count + WORTH)
        wrong, right = max(worth * mean, SMALLEST), worth * (1 - mean) + RIGHT
        number = betabinom(count, wrong, right)
        tail = (1 - COVERED) / 2
        share = round(wrong / (wrong + right), 4)
        return cls(count, share, int(number.ppf(tail)), int(number.ppf(1 - tail)))
