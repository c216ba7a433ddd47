"""Every golden record by name: how it is made, and how exactly it must come again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from golden.closed_models import MODELS
from golden.problems import PROBLEMS
from golden.record import Record, record_of


@dataclass(frozen=True)
class Golden:
    record: Callable[[], Record]
    tolerance: float = 1e-10


TABLE = {
    **{
        name: Golden(lambda problem=problem: record_of(problem), problem.tolerance)
        for name, problem in PROBLEMS.items()
    },
    **{name: Golden(make) for name, make in MODELS.items()},
}
