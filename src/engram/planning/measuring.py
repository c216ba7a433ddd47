r"""Seconds, memory and disk of a call on few examples, and what they say about many.

A call is made on twice as many examples each time, until one takes about a second. Time and disk
grow along a line in the work, :math:`c(w) = a + b w`, through the last two; memory grows with the
examples that are held at once, and with what is kept of each.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from engram.core.data.batches import Batches, Data
from engram.core.selection import spread
from engram.engine.session import LARGEST_BATCH
from engram.retraining.one_by_one import without

FIRST = 32  # examples of the first call: fewer are all opening, more may take long
ENOUGH = 1.0  # seconds after which a call says how long others take: more is surer and slower
WARM = 16  # examples of a call that is not counted: kernels and libraries are loaded in it
LOOK_EVERY = 0.002  # seconds between two looks at the memory in use


class Saved(Protocol):
    """Whatever can be written into a folder."""

    def save(self, folder: str | Path) -> Path: ...


@dataclass(frozen=True)
class Cost:
    """Of one call.

    Args:
        examples: that it was made on.
        work: what its time grows with, such as the examples.
        seconds: on the wall.
        memory: bytes at its peak, above what was in use before planning.
        disk: bytes that its result takes when it is saved.
    """

    examples: int
    work: float
    seconds: float
    memory: float
    disk: float


def part_of(data: Data, count: int) -> Data:
    """Some examples, spread evenly over the data, in the form it has."""
    number = Batches(data, 1).num_data
    if count >= number:
        return data
    kept = torch.ones(number, dtype=torch.bool)
    kept[spread(number, count)] = False
    return without(data, kept.nonzero()[:, 0])


class PeakMemory:
    """The most memory in use while this lasts, in bytes, above a level."""

    def __init__(self, device: torch.device, level: int) -> None:
        self.device, self.level, self.highest = device, level, 0
        self._ended = threading.Event()

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self

    def _look(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(LOOK_EVERY):
            self.highest = max(self.highest, process.memory_info().rss)

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.highest = torch.cuda.max_memory_allocated(self.device)
            return
        self._ended.set()
        self._thread.join()
        self.highest = max(self.highest, psutil.Process().memory_info().rss)

    @property
    def bytes(self) -> int:
        """The peak."""
        return max(0, self.highest - self.level)


def memory_in_use(device: torch.device) -> int:
    """Bytes that the process holds now on the device."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def costs(
    call: Callable[[int], Saved | None],
    num_data: int,
    device: torch.device,
    level: int,
    work: Callable[[int], float] = float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Cost]:
    """Make a call on more and more examples, until one takes long enough to tell.

    Args:
        call: with a number of examples; what it gives back is saved to see how large it is.
        num_data: examples that there are.
        device: whose memory counts.
        level: of memory in use before.
        work: of a number of examples, in any unit.
        clock: seconds; the processor's own leaves out what others take of it.
    """
    call(min(WARM, num_data))
    found: list[Cost] = []
    count = min(FIRST, num_data)
    while True:
        with PeakMemory(device, level) as peak:
            start = clock()
            made = call(count)
            seconds = clock() - start
        found.append(Cost(count, work(count), seconds, peak.bytes, _disk(made)))
        if count >= num_data or (seconds > ENOUGH and len(found) > 1):
            return found
        count = min(2 * count, num_data)


def _disk(made: Saved | None) -> int:
    if made is None:
        return 0
    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        written = made.save(Path(folder) / "saved")
        files = [written] if written.is_file() else written.rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())


def expected(found: list[Cost], num_data: int, work: float, held: int = LARGEST_BATCH) -> Cost:
    """What a call on all examples will take, from calls on few.

    Args:
        found: in the order of their size.
        num_data: examples of the call.
        work: of the call, in the unit of the others.
        held: examples at once.

    Example:
        >>> few = [Cost(32, 32, 1.0, 64e6, 3e3), Cost(64, 64, 1.5, 96e6, 5e3)]
        >>> expected(few, 1000, 1000.0, held=128)
        Cost(examples=1000, work=1000.0, seconds=16.125, memory=160058500.0, disk=63500.0)
    """
    last = found[-1]
    if last.examples >= num_data:
        return last
    before = found[-2]
    seconds = _line(before.work, before.seconds, last.work, last.seconds, work)
    disk = _line(before.examples, before.disk, last.examples, last.disk, num_data)
    filled = min(max(held, last.examples), num_data)
    memory = last.memory
    if filled > last.examples:
        memory = _line(before.examples, before.memory, last.examples, last.memory, filled)
    return Cost(num_data, work, seconds, memory + (disk - last.disk), disk)


def _line(x: float, y: float, x2: float, y2: float, at: float) -> float:
    """The line through two points, which neither falls nor starts below zero."""
    slope = max(0.0, (y2 - y) / (x2 - x)) if x2 > x else 0.0
    slope = min(slope, y2 / x2) if x2 > 0 else slope
    return y2 + slope * (at - x2)
