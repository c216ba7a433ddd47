"""What a verdict is about: the ranking, the size and the mean, each with a level and a number.

An estimate can rank examples well and be twice too large; the mean over all of them can be right
where no single one is. So a verdict speaks of each by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RANKING, SIZE, MEAN = ASPECTS = ("ranking", "size", "mean")
LEVELS = ("good", "caution", "unreliable")
GOOD, CAUTION, UNRELIABLE = range(3)
EXAMPLES, GROUP, EXACT = "examples", "group", "exact"  # what a result is about
NOT_USED = "not to be used"

CLOSE = 1.15  # a factor that is nearer to 1 is not worth words
FURTHEST = 10.0  # a factor beyond is said to be more than this


@dataclass(frozen=True)
class Expected:
    """Numbers to expect, as in runs of the study with such signals; NaN where it knows none.

    Args:
        ranking: rank correlation of the estimates with the truth, over examples.
        size: estimated over true increase of the losses, on average over examples.
        mean: estimated over true mean leave-one-out loss.
    """

    ranking: float = math.nan
    size: float = math.nan
    mean: float = math.nan


@dataclass(frozen=True)
class Aspect:
    """How far to believe one thing that a result says.

    Attributes:
        name: ``ranking``, ``size`` or ``mean``.
        level: ``good``, ``caution`` or ``unreliable``.
        value: what to expect of it: a rank correlation of a ranking, else estimated over true; NaN
            where nothing is known.
        subject: what the result is about: ``examples``, or a ``group`` that is left out, of which
            the ranking is the sign of the effect and the mean its own loss without it; ``exact``
            where that is no estimate.

    Example:
        >>> Aspect("size", "caution", 1.62).text
        'sizes about 1.6 times too large'
        >>> Aspect("mean", "good").text
        'mean LOO within 20 %'
    """

    name: str
    level: str
    value: float = math.nan
    subject: str = EXAMPLES

    @property
    def text(self) -> str:
        """Level and number in words."""
        noun, *words = WORDS[self.subject][self.name]
        known = self.name != RANKING and self.level == LEVELS[CAUTION]
        said = (known and _off(self.value)) or words[LEVELS.index(self.level)]
        return f"{noun} {said}"

    def __str__(self) -> str:
        return self.text


# what each aspect is called, and what is said of it at each level
WORDS = {
    EXAMPLES: {
        RANKING: ("ranking", "good", "roughly right", NOT_USED),
        SIZE: ("sizes", "within 1.5 times", "within 3 times", NOT_USED),
        MEAN: ("mean LOO", "within 20 %", "within a factor 2", NOT_USED),
    },
    GROUP: {
        RANKING: ("sign", "right", "mostly right", NOT_USED),
        SIZE: ("size", "within 3 times", "of the right order", NOT_USED),
        MEAN: ("its own loss", "within 3 times", "of the right order", NOT_USED),
    },
    EXACT: {
        RANKING: ("sign", "right", "mostly right", NOT_USED),
        SIZE: ("size", "exact", "of the right order", NOT_USED),
        MEAN: ("its own loss", "exact", "of the right order", NOT_USED),
    },
}


def _off(ratio: float) -> str:
    """A ratio of estimated to true in words; empty where it is near 1, or not known."""
    if math.isnan(ratio) or 1 / CLOSE < ratio < CLOSE:
        return ""
    way, factor = ("large", ratio) if ratio > 1 else ("small", 1 / max(ratio, 1 / (2 * FURTHEST)))
    if factor > FURTHEST:
        return f"more than {FURTHEST:.0f} times too {way}"
    return f"about {factor:.1f} times too {way}"
