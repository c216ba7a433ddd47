"""Loops that will take minutes say so after some seconds, and only these."""

import warnings
from itertools import count

import pytest

from engram.core.progress import Pace


def steps(number: int, seconds: int) -> list[str]:
    """What is said in the first 20 of so many steps."""
    ticks = count(0, seconds)
    pace = Pace(number, "backward passes", "do less", clock=lambda: next(ticks))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(20):
            pace.step()
    return [str(warning.message) for warning in said]


def test_a_long_loop_is_told_once() -> None:
    said = ["10,000 backward passes will take about 167 minutes; do less"]
    assert steps(10_000, 1) == said


@pytest.mark.parametrize(("number", "seconds"), [(50, 1), (10_000, 0), (20, 3)])
def test_short_loops_are_not(number: int, seconds: int) -> None:
    assert steps(number, seconds) == []
