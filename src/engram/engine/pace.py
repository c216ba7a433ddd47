"""A word about loops that will take long, while there is time to choose another way."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

FIRST = 5.0  # seconds after which a loop has shown how fast it is
LONG = 60.0
QUICKER = 'estimator="linear" takes one'


class Pace:
    """Warns once where the steps of a loop will take longer than a minute.

    Args:
        steps: how many there will be.
        what: they are.
        quicker: what else to do.
        clock: seconds.
    """

    def __init__(
        self, steps: int, what: str, quicker: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps, self.what, self.quicker, self.clock = steps, what, quicker, clock
        self.begun, self.done, self.told = clock(), 0, False

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        passed = self.clock() - self.begun
        if self.told or passed < FIRST:
            return
        self.told = True
        expected = passed / self.done * self.steps
        if expected > LONG:
            warnings.warn(
                f"{self.steps:,} {self.what} will take about {expected / 60:,.0f} minutes; "
                f"{self.quicker}",
                stacklevel=2,
            )
