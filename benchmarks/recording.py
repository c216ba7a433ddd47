"""What ``engram.record`` adds to a training step, as a ratio.

``python -m benchmarks.recording`` trains two copies of a net in turns on the same batches, one of
them recorded with everything that is on by default: time, weight decay, clipping, checkpoints.
Processor time of one thread. The start, where roots are read at every step and snapshots are dense,
is in it: a run is a whole training from its first step.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import engram
from benchmarks.data import images
from benchmarks.nets import build
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from engram.training.record import CHECKPOINTS

BAR = 1.03
NETS = ("mlp", "lenet5")
BATCH_SIZE = 128
EXAMPLES = 4096
STEPS = (1000, 300)  # of a training: 12 epochs of 10,000 examples, and a short one
TURN = 10  # steps of one copy before the other has its turn
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD with momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "Adam": lambda p: Adam(p, lr=1e-3),
    "AdamW": lambda p: AdamW(p, lr=1e-3, weight_decay=1e-2),
    "RMSprop": lambda p: RMSprop(p, lr=1e-4),
}


class Run:
    """A training that is stopped and gone on with."""

    def __init__(self, net: str, make: Callable[[Any], Optimizer], recorded: bool) -> None:
        self.model = build(net)
        self.optimizer = make(self.model.parameters())
        self.training = engram.record(self.optimizer, self.model) if recorded else None

    def turn(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Seconds of some steps."""
        start = time.process_time()
        for inputs, labels in batches:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()
        return time.process_time() - start


def measure(
    net: str, make: Callable[[Any], Optimizer], steps: int, repeats: int, seed: int
) -> dict[str, float]:
    """Recorded over plain, of whole trainings: the median over them, and the spread."""
    data = images(EXAMPLES, seed)
    inputs, labels = data.first(EXAMPLES)
    generator = torch.Generator().manual_seed(seed)
    ratios, seconds = [], []
    for _ in range(repeats):
        runs = Run(net, make, False), Run(net, make, True)
        spent = [0.0, 0.0]
        for number in range(steps // TURN):
            chosen = [
                torch.randint(EXAMPLES, (BATCH_SIZE,), generator=generator) for _ in range(TURN)
            ]
            batches = [(inputs[rows], labels[rows]) for rows in chosen]
            order = (0, 1) if number % 2 else (1, 0)
            for place in order:
                spent[place] += runs[place].turn(batches)
        ratios.append(spent[1] / spent[0])
        seconds.append(spent[0] / steps)
    return {
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "milliseconds": 1000 * median(seconds),
    }


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = [
        [
            row["net"],
            f"{row['steps']:,}",
            row["optimizer"],
            f"{row['milliseconds']:.1f}",
            f"**{row['ratio']:.3f}**" if row["ratio"] > BAR else f"{row['ratio']:.3f}",
            f"{row['lowest']:.3f} to {row['highest']:.3f}",
        ]
        for row in record["rows"]
    ]
    return f"""# Recording

What `engram.record(optimizer, model)` adds to a training step: whole trainings from the first step
on, with batches of {BATCH_SIZE}, recorded over plain, in turns of {TURN} steps on the same batches;
the median of {record["repeats"]} trainings, and their spread. Processor time of one thread.
Everything is on: training time, weight decay, clipping, snapshots for {CHECKPOINTS} checkpoints.
Short trainings pay more for a step: in the beginning roots are read at every step, and snapshots,
whose number grows with the logarithm of the steps, are dense. Data: {record["data"]}.
{conditions(record["environment"])}
The bar is {BAR:.2f} for SGD and Adam; what is above it is bold. RMSprop forgets a hundredth of its
average in a step, so that its root is read at every second one.
Written by `python -m benchmarks.recording`.

{table(["net", "steps", "optimizer", "plain step, ms", "recorded over plain", "spread"], rows)}
"""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="of a training")
    parser.add_argument("--repeats", type=int, default=5, help="trainings; the median is taken")
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "data": images(1).source,
        "repeats": chosen.repeats,
        "rows": [],
    }
    for net in chosen.nets:
        for steps, name in itertools.product(chosen.steps, chosen.optimizers):
            found = measure(net, OPTIMIZERS[name], steps, chosen.repeats, chosen.seed)
            row = {"net": net, "steps": steps, "optimizer": name} | found
            print(row, flush=True)
            record["rows"].append(row)
    write(chosen.output, "recording", record, page(record))


if __name__ == "__main__":
    main()
