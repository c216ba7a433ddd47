"""Peak memory of a pass, as a multiple of that of a training step with the same batch size."""

from __future__ import annotations

import argparse
import ctypes
import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import engram
from benchmarks.data import images
from benchmarks.nets import NETS, build
from benchmarks.records import RESULTS, against, conditions, table, write
from benchmarks.timing import environment
from benchmarks.training import BATCH_SIZE, epoch

BAR = 2.0
EXAMPLES = 2 * BATCH_SIZE  # the second batch shows what the first leaves behind
FIT_EXAMPLES = 4  # few, so that fitting leaves no memory to be used again
TASKS = ("training", "diagonal", "kronecker")


def status(field: str) -> int:
    """A size from the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def settle() -> int:
    """Give freed memory back, forget the peak so far, and say what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
    return status("VmRSS")


def peak(net: str, task: str, seed: int) -> int:
    """Bytes above what the model, its posterior and the data take; call in a fresh process."""
    data = images(EXAMPLES, seed)
    model = build(net, seed=seed)
    if task == "training":
        optimizer = torch.optim.Adam(model.parameters())
        before = settle()
        epoch(model, optimizer, data.first(EXAMPLES))
    else:
        few = data.first(FIT_EXAMPLES)
        posterior = engram.laplace(
            model, few, structure=task, curvature="fisher", progress=False, prior_precision=1.0
        )
        before = settle()
        engram.sensitivities(
            model, data.first(EXAMPLES), posterior, batch_size=BATCH_SIZE, progress=False
        )
    return status("VmHWM") - before


def measure(net: str, repeats: int, seed: int) -> dict[str, Any]:
    """Peaks of all tasks, each in processes of its own."""
    peaks: dict[str, list[int]] = {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for task in TASKS:
            started = [processes.submit(peak, net, task, seed) for _ in range(repeats)]
            peaks[task] = [future.result() for future in started]
    step = median(peaks["training"])
    return {
        "ratio": {task: median(found) / step for task, found in peaks.items()},
        "bytes": peaks,
    }


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = []
    for net, found in record["nets"].items():
        step = median(found["bytes"]["training"]) / 2**20
        ratios = [against(found["ratio"][task], BAR) for task in TASKS[1:]]
        rows.append([net, f"{step:.0f} MiB", *ratios, f"<= {BAR}"])
    return f"""# Memory

Peak resident memory of `engram.sensitivities` (`linear`, diagnostics included) over that of a
training step with Adam, both with batch size {BATCH_SIZE}, above what the model, its posterior and
the data take. Each is measured in a fresh process; the median of {record["repeats"]}. Data:
{record["data"]}. {conditions(record["environment"])}
A figure above its bar is bold. Written by `python -m benchmarks.memory`.

{table(["net", "training step", "diagonal", "Kronecker", "bar"], rows)}
"""


def main() -> None:
    """Measure net by net."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes a figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "data": images(1).source,
        "batch_size": BATCH_SIZE,
        "repeats": chosen.repeats,
        "nets": {net: measure(net, chosen.repeats, chosen.seed) for net in chosen.nets},
    }
    write(chosen.output, "memory", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
