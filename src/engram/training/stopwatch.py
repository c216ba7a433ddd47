"""How long the steps of a training take, its pauses left out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

# What lies between two steps is a pause, of a notebook that waits, where it is longer than both:
# batches of an epoch's start, an evaluation and a checkpoint are part of a training
PAUSE_SECONDS = 5.0
PAUSE_STEPS = 20.0  # times the mean so far


@dataclass
class Stopwatch:
    """The time from one step to the next, added up.

    Args:
        intervals: that were measured.
        seconds: that they took.
    """

    intervals: int = 0
    seconds: float = 0.0
    _last: float | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def seconds_per_step(self) -> float:
        """Their mean; NaN where fewer than two steps were seen."""
        return self.seconds / self.intervals if self.intervals else math.nan

    def lap(self) -> None:
        """A step has ended."""
        self.reached(time.perf_counter())

    def reached(self, now: float) -> None:
        """A step has ended at this time, in seconds.

        Example:
            >>> watch = Stopwatch()
            >>> for now in (10.0, 10.5, 11.0, 3600.0, 3600.5):
            ...     watch.reached(now)
            >>> watch.intervals, watch.seconds_per_step
            (3, 0.5)
        """
        last, self._last = self._last, now
        if last is None:
            return
        taken = now - last
        if self.intervals and taken > max(PAUSE_SECONDS, PAUSE_STEPS * self.seconds_per_step):
            return
        self.intervals += 1
        self.seconds += taken
