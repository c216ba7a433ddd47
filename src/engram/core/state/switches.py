"""Settings of the whole process that are other while some thread asks for it.

They are switched once, by the first thread that asks, and back by the last one that is done,
whatever order they end in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

# how to read one, how to set it, and what it is while somebody asks
Switch = tuple[Callable[[], Any], Callable[[Any], object], Any]


class Switches:
    """Switches with the threads that ask for them, and how often each does."""

    def __init__(self, switches: Sequence[Switch]) -> None:
        self.switches = tuple(switches)
        self._lock = threading.RLock()
        self._depth: dict[int, int] = {}  # how often each thread has asked
        self._before: list[Any] = []  # as they were before the first thread asked

    def times_asked(self) -> int:
        """How often this thread has asked."""
        return self._depth.get(threading.get_ident(), 0)

    @property
    def anybody(self) -> bool:
        """Whether some thread has asked."""
        return bool(self._before)

    def reset(self, depth: int) -> None:
        """As if this thread had asked so often, whatever was left open; the switches follow.

        Every step may be done twice, so that a Ctrl-C in between is mended by the next call.
        """
        with self._lock:
            thread = threading.get_ident()
            self._depth[thread] = depth
            if not depth:
                del self._depth[thread]
            if self._depth:
                if not self._before:
                    self._before[:] = [read() for read, _, _ in self.switches]  # all, or none
                self._write([asked for _, _, asked in self.switches])
            elif self._before:
                self._write(self._before)
                self._before.clear()

    def _write(self, values: Sequence[Any]) -> None:
        for (_, write, _), value in zip(self.switches, values, strict=True):
            write(value)


class Asked:
    """A thread asks while this lasts; subclasses name the switches."""

    switches: Switches

    def __enter__(self) -> None:
        self.depth = self.switches.times_asked()
        self.switches.reset(self.depth + 1)

    def __exit__(self, *failure: object) -> None:
        self.switches.reset(self.depth)
