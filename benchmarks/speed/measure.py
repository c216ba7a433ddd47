"""Time and peak memory of one way on one net, in a process of its own."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from benchmarks.faithfulness.limits import limited
from benchmarks.libraries.case import Case, Way, summed_loss
from benchmarks.memory import settle, status
from benchmarks.speed.settings import Setting
from benchmarks.timing import Line, ratio

FEWEST = 16  # examples that a slow way is timed on
ALLOWED = 60.0  # seconds of processor time for one call; on a few examples
LARGE = 12 * 2**30


def epoch(case: Case) -> Callable[[], None]:
    """Plain training with Adam over the examples."""
    model = deepcopy(case.model).train()
    optimizer = torch.optim.Adam(model.parameters())

    def run() -> None:
        for inputs, targets in zip(*(t.split(case.batch_size) for t in case.train), strict=True):
            optimizer.zero_grad()
            (summed_loss(model(inputs), targets) / len(targets)).backward()
            optimizer.step()

    return run


def clocked(task: Callable[[], object]) -> float:
    """Seconds of processor time."""
    began = time.process_time()
    task()
    return time.process_time() - began


def examples(setting: Setting, way: Way, seconds: float) -> int:
    """How many a way manages in so many seconds, by what a few take; it is warm after that."""
    way(setting.case(FEWEST))
    if math.isinf(seconds) or setting.examples <= FEWEST:
        return setting.examples
    sizes = FEWEST, min(2 * FEWEST, setting.examples)
    line = Line.through({n: [clocked(lambda n=n: way(setting.case(n)))] for n in sizes})
    if line.at(setting.examples) <= seconds:
        return setting.examples
    able = (seconds - max(line.fixed, 0.0)) / max(line.per_example, 1e-9)
    return int(min(setting.examples, max(2 * FEWEST, able)))


def measured(setting: Setting, way: Way, repeats: int, seconds: float) -> dict[str, Any]:
    """Epochs that the way takes, from calls and epochs in turns, and its peak memory."""
    with limited(ALLOWED, LARGE):
        count = examples(setting, way, seconds)
    case, plain = setting.case(count), epoch(setting.case(setting.examples))
    plain()
    before = settle()
    with limited(ALLOWED, LARGE):
        way(case)
    peak = status("VmHWM") - before
    tasks = {"epoch": plain, count: lambda: way(case)}
    if count < setting.examples:
        few = setting.case(count // 4)
        tasks[count // 4] = lambda: way(few)
    taken = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            taken[name].append(clocked(task))
    return {
        "epochs": epochs(taken, count, setting.examples),
        "examples": count,
        "bytes": peak,
        "seconds": {str(name): [round(t, 4) for t in found] for name, found in taken.items()},
    }


def epochs(taken: dict[str | int, list[float]], count: int, wanted: int) -> float:
    """As measured; where on fewer examples than wanted, by the line through two sizes."""
    if count == wanted:
        return ratio(taken[count], taken["epoch"])
    line = Line.through({n: times for n, times in taken.items() if n != "epoch"})
    return line.at(wanted) / median(taken["epoch"])


def training_step(setting: Setting) -> int:
    """Peak memory of two steps of plain training."""
    case = setting.case(2 * Case.batch_size)
    plain = epoch(case)
    before = settle()
    plain()
    return status("VmHWM") - before


def apart(task: Callable[..., Any], *given: Any) -> Any:
    """The value of a call in a forked process, or its error in a dict."""
    ours, theirs = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_run, args=(theirs, task, given))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = {"failed": "the process ended"}
    process.join()
    return found


def _run(pipe: Connection, task: Callable[..., Any], given: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    try:
        found = task(*given)
    except Exception as error:  # whatever a library raises is its row in the table
        first = (str(error).strip() or "no message").splitlines()[0]
        found = {"failed": f"{type(error).__name__}: {first}"}
    pipe.send(found)
