"""A few ratios of speed and memory against those on record; more than a tenth above is told.

``python -m benchmarks.ratios`` measures and compares, and ends with code 1 where a ratio has grown;
``--write`` puts what it measured on record. Processor time of one thread, on small nets: what is
compared is the code, not the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, pass_cost, streaming
from benchmarks.data import images
from benchmarks.records import RESULTS, conditions, table, times, write
from benchmarks.timing import environment, interleaved, ratio
from benchmarks.training import BATCH_SIZE

ALLOWED = 1.1
EXAMPLES = {"mlp": 4096, "lenet5": 2048}
TIMED = {
    "diagonal": "pass, diagonal, over epoch",
    "kronecker": "pass, Kronecker, over epoch",
    "sampled_kfac": "fit, sampled Kronecker, over epoch",
    "exact_kfac": "fit, exact Kronecker, over epoch",
}
STREAMED, REMEMBERED = ("mlp", "lenet5"), ("lenet5",)
CLOCK = "cpu"
# freed memory goes back at once, so that a peak is what is in use; read when a process starts
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def timed(net: str, count: int, repeats: int, seed: int) -> dict[str, float]:
    """A pass and a fit over a training epoch on the same examples, taken in turns."""
    data = images(count, seed)
    model = pass_cost.trained(net, 10, data.first(count), seed)
    tasks = pass_cost.passes(model, data, count)
    for name, (curvature, tolerance) in pass_cost.FITS.items():
        tasks[name] = partial(
            pass_cost.fit, model, structure="kronecker", curvature=curvature, tolerance=tolerance
        )
    chosen = {name: partial(tasks[name], data.first(count)) for name in ("epoch", *TIMED)}
    for task in chosen.values():
        task()  # warm up
    seconds = interleaved(chosen, repeats, CLOCK)
    return {
        f"{net}: {words}": ratio(seconds[name], seconds["epoch"]) for name, words in TIMED.items()
    }


def measured(repeats: int, seed: int) -> dict[str, float]:
    """Every ratio by name."""
    found: dict[str, float] = {}
    for net, count in EXAMPLES.items():
        found |= timed(net, count, repeats, seed)
    for net in STREAMED:
        ratios = streaming.measure(net, repeats, seed)["ratio"]
        found[f"{net}: streamed step over step"] = ratios[CLOCK]
    os.environ.update(RETURNED)
    for net in REMEMBERED:
        ratios = memory.measure(net, 2, seed)["ratio"]
        for task in memory.TASKS[1:]:
            found[f"{net}: memory of a pass, {task}, over step"] = ratios[task]
    return found


def grown(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
    """By how much each ratio is larger that is more than a tenth above the one on record."""
    shares = {name: value / then[name] for name, value in now.items() if name in then}
    return {name: share - 1 for name, share in shares.items() if share > ALLOWED}


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = [[name, times(value)] for name, value in record["ratios"].items()]
    return f"""# Ratios on record

What a change of the code is held against: `python -m benchmarks.ratios` measures these again and
tells what is more than a tenth above. Processor time of one thread; medians of {record["repeats"]}
rounds in which all take turns, batch size {BATCH_SIZE}. Data: {record["data"]}.
{conditions(record["environment"])} {record["note"]}

{table(["what", "ratio"], rows)}
"""


def main() -> int:
    """Measure, then compare or write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ratios", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put what is measured on record")
    parser.add_argument("--note", default="", help="a sentence to go with the record")
    parser.add_argument("--repeats", type=int, default=15, help="rounds; medians are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of ratios.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "data": images(1).source,
        "repeats": chosen.repeats,
        "note": chosen.note,
        "ratios": measured(chosen.repeats, chosen.seed),
    }
    if chosen.write:
        write(chosen.output, "ratios", record, page(record))
        print(page(record))
        return 0
    stored = json.loads((chosen.output / "ratios.json").read_text())["ratios"]
    larger = grown(record["ratios"], stored)
    for name, value in record["ratios"].items():
        told = f"  {larger[name]:+.0%}: more than a tenth above" if name in larger else ""
        print(f"{name:<50} {times(value):>6}  on record {times(stored.get(name)):>6}{told}")
    return int(bool(larger))


if __name__ == "__main__":
    sys.exit(main())
