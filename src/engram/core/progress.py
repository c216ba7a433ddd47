"""A progress bar for what takes longer than a few seconds, and a warning for minutes.

tqdm takes locks of the whole process for every bar that it makes, also for one that is never shown.
Ctrl-C in that moment leaves them taken, and the next thread or forked process waits for ever. So a
bar is made when there is something to show.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import psutil
from tqdm.auto import tqdm

T = TypeVar("T")
# Seconds: less tells sooner, and prints more that nobody needed
DELAY = 2.0  # before a bar is shown: shorter calls stay silent
TOLD_EVERY = 0.5  # between two messages behind a bar
LOGGED_EVERY = 10.0  # between two lines of a bar that goes to a file
PACE_KNOWN = 5.0  # after which the pace of a loop says how long all of it will take
LONG = 60.0  # a loop that will take longer is announced, with what would be quicker
MINUTE, HOUR = 60.0, 3600.0  # seconds; two of each are told in that unit


def time_in_words(seconds: float) -> str:
    """A time for people to read.

    Example:
        >>> time_in_words(7.2), time_in_words(600), time_in_words(9000)
        ('7 s', '10 min', '2.5 h')
    """
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1g} s"
    return f"{seconds / MINUTE:.0f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} h"


class Bar:
    """Counts, and shows how far it is once it has lasted for some seconds.

    Where it will take more than a minute, by its pace so far, that is said once, with the memory.

    Args:
        total: what it counts up to, where that is known.
        description: what is going on.
        shown: whether it is shown at all.
        form: of the line, as tqdm's ``bar_format``; who has one says by itself how long it takes.
    """

    def __init__(
        self, total: int | None, description: str, shown: bool, form: str | None = None
    ) -> None:
        self.total, self.description, self.shown, self.form = total, description, shown, form
        self.count: float = 0
        self.begun = time.monotonic()
        self._bar: Any = None
        self._told = -math.inf
        self._expects = shown and form is None and total is not None

    def describe(self, description: str) -> None:
        """Change the words beside the bar."""
        self.description = description
        if self._bar is not None:
            self._bar.set_description_str(description, refresh=False)

    def update(self, count: float = 1) -> None:
        """Add to the count of what is done."""
        self.count += count
        if self._bar is not None:
            self._bar.update(count)
        elif self.shown and time.monotonic() - self.begun > DELAY:
            self._show()
        if self._expects:
            self._say_how_long(time.monotonic() - self.begun)

    def _say_how_long(self, passed: float) -> None:
        """Once the pace is known, and where all of it takes long."""
        if passed < PACE_KNOWN or self.count <= 0 or self.total is None:
            return
        self._expects = False
        expected = passed / self.count * self.total
        if expected > LONG:
            memory = psutil.Process().memory_info().rss / 1e9
            words = f"{self.description}: about {time_in_words(expected)} in all"
            announce(f"{words}, with {memory:.3g} GB of memory in use", self.shown)

    def tell(self, words: str) -> None:
        """Words behind the bar on what goes on where nothing is done yet; at most some a second."""
        now = time.monotonic()
        if not self.shown or now - self.begun <= DELAY or now - self._told < TOLD_EVERY:
            return
        self._told = now
        if self._bar is None:
            self._show()
        self._bar.set_postfix_str(words)

    def _show(self) -> None:
        seen = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bar = tqdm(
            total=self.total,
            desc=self.description,
            leave=False,
            bar_format=self.form,
            mininterval=0.1 if seen else LOGGED_EVERY,
        )
        if self._bar.disable:  # by TQDM_DISABLE: such a bar has no clock
            return
        self._bar.start_t -= time.monotonic() - self.begun  # the time left counts from the start
        self._bar.update(self.count)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def announce(text: str, shown: bool) -> None:
    """A line before something that takes long begins; where bars are shown, and in their place."""
    if shown:
        tqdm.write(text, file=sys.stderr)


def progress_over(
    items: Iterable[T], description: str, shown: bool, total: int | None = None
) -> Iterator[T]:
    """The items, behind a bar.

    Args:
        items: to go through.
        description: what is done with them.
        shown: whether there is a bar at all.
        total: how many there are, where ``len`` does not say.

    Example:
        >>> list(progress_over("abc", "letters", shown=True))
        ['a', 'b', 'c']
    """
    known = len(items) if total is None and isinstance(items, Sized) else total
    with Bar(known, description, shown) as bar:
        for item in items:
            yield item
            bar.update()


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
        """Count one step."""
        self.done += 1
        passed = self.clock() - self.begun
        if self.told or passed < PACE_KNOWN:
            return
        self.told = True
        expected = passed / self.done * self.steps
        if expected > LONG:
            warnings.warn(
                f"{self.steps:,} {self.what} will take about {expected / 60:,.0f} minutes; "
                f"{self.quicker}",
                stacklevel=2,
            )
