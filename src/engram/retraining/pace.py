"""How long trainings will take: measured before they begin, or on the first; and shown by steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from engram.core.progress import Bar, announce, time_in_words

WORTH_SAYING = 5.0  # seconds in all, below which nobody has to be told beforehand
LONG_FIRST = 5.0  # seconds of a first training, after which what is known so far is said


def say_cost(trainings: int, seconds: float, how: str, shown: bool, about: str = "about") -> None:
    """A line on what trainings will take, where that is more than some seconds.

    Args:
        trainings: how many.
        seconds: of each.
        how: they are trained.
        shown: whether anything is.
        about: how sure that is.
    """
    if trainings * seconds > WORTH_SAYING:
        each = f"{trainings:,} trainings, {time_in_words(seconds)} each, {how}"
        announce(f"about {time_in_words(trainings * seconds)}: {each}", shown)


class StepPace:
    """Shows trainings on a bar by the steps that any optimizer takes in them.

    How many steps a training has is known once the first has ended, and what all will take is said
    then.
    """

    def __init__(self) -> None:
        self.steps = 0  # of the first training; 0 while it is not over
        self._said = False

    @contextmanager
    def reported(self, bar: Bar) -> Iterator[None]:
        """One training inside, counted on the bar as 1."""
        taken, shown, began = 0, 0.0, time.perf_counter()

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal taken, shown
            taken += 1
            if self.steps == 0:
                bar.tell(f"{taken:,} steps of the first")
                self._say_begun(bar, taken, time.perf_counter() - began)
            elif taken <= self.steps:
                bar.update(taken / self.steps - shown)
                shown = taken / self.steps

        handle = register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            handle.remove()
        bar.update(1.0 - shown)
        if self.steps == 0:
            seconds = time.perf_counter() - began
            how = f"measured on the first, which took {taken:,} steps"
            say_cost(max(1, bar.total or 1), seconds, how, bar.shown)
        self.steps = self.steps or max(taken, 1)

    def _say_begun(self, bar: Bar, taken: int, seconds: float) -> None:
        """What is known of trainings while the first, a long one, goes on."""
        if self._said or seconds < LONG_FIRST:
            return
        self._said = True
        announce(
            f"{bar.total:,} trainings; the first has taken {taken:,} steps in "
            f"{time_in_words(seconds)}, "
            "and when it ends it is known what all will take",
            bar.shown,
        )
