"""Times taken in turns, so that a busy machine slows all of them alike, and their ratios."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy
import torch

import engram

Key = TypeVar("Key", bound=Hashable)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def interleaved(
    tasks: Mapping[Key, Callable[[], object]], repeats: int, clock: str = "wall"
) -> dict[Key, list[float]]:
    """Seconds of every task in every round; a round runs each task once.

    The caller warms up: first calls load kernels, and a full-sized one would double the cost.
    On a machine shared with others the ``cpu`` clock with one thread leaves out their share.
    """
    now = CLOCKS[clock]
    seconds: dict[Key, list[float]] = {key: [] for key in tasks}
    for number in range(repeats):
        for key, task in tasks.items():
            start = now()
            task()
            seconds[key].append(now() - start)
        total = sum(times[-1] for times in seconds.values())
        print(f"  round {number + 1} of {repeats}: {total:.0f} s", file=sys.stderr, flush=True)
    return seconds


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of one task's time over another's in the same round."""
    return median(a / b for a, b in zip(times, base, strict=True))


@dataclass(frozen=True)
class Line:
    """cost(N) = fixed + N * per_example, in seconds, through the medians at two sizes."""

    fixed: float
    per_example: float

    @classmethod
    def through(cls, times_at: Mapping[int, Sequence[float]]) -> Line:
        """The line through the times at two sizes."""
        (small, few), (large, many) = sorted((n, median(t)) for n, t in times_at.items())
        per_example = (many - few) / (large - small)
        return cls(few - small * per_example, per_example)

    def at(self, count: int) -> float:
        """Seconds for this many examples."""
        return self.fixed + count * self.per_example


def environment(seed: int) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "engram": engram.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "seed": seed,
    }
