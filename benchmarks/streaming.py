"""The cost of a streamed training step, as a multiple of a plain one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import engram
from benchmarks.data import images
from benchmarks.nets import NETS, build
from benchmarks.records import RESULTS, against, conditions, table, write
from benchmarks.timing import CLOCKS, environment, ratio
from benchmarks.training import BATCH_SIZE
from engram.tracking.sources import READ_EVERY

BAR = 1.7
BARRED = ("mlp", "lenet5")
EXAMPLES = 16 * BATCH_SIZE
WEIGHT_DECAY = 1e-3
WARM_UP = 24  # the optimizer's state is read at every step before


def steps(net: str, streamed: bool, seed: int) -> Callable[[int], None]:
    """A training run that makes one step at a time, with the tracker or without."""
    inputs, targets = images(EXAMPLES, seed).first(EXAMPLES)
    model = build(net, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=WEIGHT_DECAY)
    tracker = engram.Tracker(model, optimizer, (inputs, targets))

    def backward(batch: Tensor) -> None:
        functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()

    def step(number: int) -> None:
        batch = (torch.arange(BATCH_SIZE) + number * BATCH_SIZE) % EXAMPLES
        optimizer.zero_grad()
        if streamed:
            with tracker.step(batch):
                backward(batch)
        else:
            backward(batch)
        optimizer.step()

    return step


def measure(net: str, rounds: int, seed: int) -> dict[str, Any]:
    """Seconds a step, plain and streamed in turns, on both clocks.

    A turn is as many steps as from one reading of the optimizer's state to the next.
    """
    runs = {"plain": steps(net, False, seed), "streamed": steps(net, True, seed)}
    seconds: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in runs} for clock in CLOCKS
    }
    for number in range(WARM_UP):
        for step in runs.values():
            step(number)
    for first in range(WARM_UP, WARM_UP + rounds * READ_EVERY, READ_EVERY):
        for name, step in runs.items():
            start = {clock: now() for clock, now in CLOCKS.items()}
            for number in range(first, first + READ_EVERY):
                step(number)
            for clock, now in CLOCKS.items():
                seconds[clock][name].append((now() - start[clock]) / READ_EVERY)
    return {
        "ratio": {clock: ratio(s["streamed"], s["plain"]) for clock, s in seconds.items()},
        "spread": {clock: _spread(s) for clock, s in seconds.items()},
        "seconds": seconds,
    }


def _spread(seconds: dict[str, list[float]]) -> tuple[float, float]:
    """The middle half of the ratios."""
    pairs = zip(seconds["streamed"], seconds["plain"], strict=True)
    low, _, high = quantiles((a / b for a, b in pairs), n=4)
    return low, high


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = []
    for net, found in record["nets"].items():
        bar = BAR if net in BARRED else float("inf")
        plain = 1e3 * median(found["seconds"]["cpu"]["plain"])
        row = [net, f"{plain:.1f} ms"]
        for clock in CLOCKS:
            low, high = found["spread"][clock]
            row += [against(found["ratio"][clock], bar), f"{low:.2f} to {high:.2f}"]
        rows.append([*row, f"<= {BAR}" if net in BARRED else "-"])
    header = ["net", "plain step (cpu)"]
    header += [part for clock in CLOCKS for part in (clock, f"middle half, {clock}")]
    return f"""# Streaming

A training step inside `with tracker.step(indices):` over a plain one (forward, cross entropy,
backward, Adam; batch size {BATCH_SIZE}), the two in turns of {READ_EVERY} steps in one run, one of
which reads the optimizer's state: medians over {record["rounds"]} turns, by the wall clock and by
the processor time of the process.
Data: {record["data"]}. {conditions(record["environment"])}
A figure above its bar is bold. Written by `python -m benchmarks.streaming`.

{table([*header, "bar"], rows)}

The transformer has attention and position parameters, which are not followed on the user's own
pass: its batches are run once more.
"""


def main() -> None:
    """Measure net by net."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    chosen_nets = [*BARRED, "transformer"]
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=chosen_nets)
    parser.add_argument("--rounds", type=int, default=20, help="turns a net")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "data": images(1).source,
        "batch_size": BATCH_SIZE,
        "rounds": chosen.rounds,
        "nets": {net: measure(net, chosen.rounds, chosen.seed) for net in chosen.nets},
    }
    write(chosen.output, "streaming", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
