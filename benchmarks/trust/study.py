"""All runs of the study, several problems at a time."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.timing import environment
from benchmarks.trust.problems import PROBLEMS
from benchmarks.trust.runs import WAYS, run
from benchmarks.trust.truths import solve


def measure(number: int, seed: int) -> list[dict[str, Any]]:
    """All ways on one problem, in one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    solved = solve(PROBLEMS[number], seed)
    found = [run(solved, way) for way in WAYS]
    print(f"  {PROBLEMS[number].name}", file=sys.stderr, flush=True)
    return found


def study(seed: int, processes: int) -> dict[str, Any]:
    """The record of the study."""
    numbers = range(len(PROBLEMS))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = list(pool.map(measure, numbers, [seed] * len(PROBLEMS)))
    return {
        "environment": environment(seed),
        "runs": [each for problem in found for each in problem],
    }
