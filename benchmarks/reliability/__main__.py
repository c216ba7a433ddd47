"""Ctrl-C and SIGKILL at random times over everything that computes long or writes.

After Ctrl-C the model and the process must be as before, to the bit, and the same call gives the
same numbers; after either, a folder holds one whole version, and a retraining goes on with what was
finished.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.reliability.signals import Outcome, interrupts, kills
from benchmarks.reliability.works import Pass, Work, works
from benchmarks.timing import environment

INTERRUPTS, KILLS = 200, 100
COMMAND = "python -m benchmarks.reliability"


def shares(named: list[Work], total: int, light: int) -> list[int]:
    """How many signals each work gets; one that writes nothing counts ``light`` in ten."""
    weights = [light if isinstance(work, Pass) else 10 for work in named]
    ends = [round(total * sum(weights[: n + 1]) / sum(weights)) for n in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, list[Outcome]]:
    """All outcomes of both signals."""
    random = Random(chosen.seed)
    os.chdir(folder)
    named = works(folder / "scratch", chosen.seed)
    found: dict[str, list[Outcome]] = {"SIGINT": [], "SIGKILL": []}
    for work, count in zip(named, shares(named, chosen.interrupts, 15), strict=True):
        print(f"{work.name}: {count} SIGINTs", file=sys.stderr, flush=True)
        found["SIGINT"] += interrupts(work, folder / "folder", count, random)
    for work, count in zip(named, shares(named, chosen.kills, 4), strict=True):
        print(f"{work.name}: {count} SIGKILLs", file=sys.stderr, flush=True)
        found["SIGKILL"] += kills(work, folder / "folder", count, random)
    return found


def summary(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Counts by work."""
    by_work: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        row = by_work.setdefault(
            outcome.work, {"sent": 0, "struck": 0, "changed": 0, "found": Counter()}
        )
        row["sent"] += 1
        row["struck"] += outcome.struck
        row["changed"] += bool(outcome.changed)
        row["found"][outcome.found] += 1
    return by_work


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    header = ["call", "sent", "during the call", "state changed", "found afterwards"]
    parts = []
    for kind, by_work in record["summary"].items():
        rows = [
            [
                name,
                *(str(row[key]) for key in ("sent", "struck", "changed")),
                ", ".join(f"{count} {word}" for word, count in row["found"].items()),
            ]
            for name, row in by_work.items()
        ]
        parts.append(f"## {kind}\n\n{table(header, rows)}")
    faults = sum(len(found) for found in record["faults"].values())
    return f"""# Reliability

{record["interrupts"]} times Ctrl-C and {record["kills"]} times SIGKILL, each at a random time
during a call on a small net with attention, dropout, batch statistics, gradients, a hook and a
frozen weight. Faults: {faults}. {conditions(record["environment"])} Written by `{COMMAND}`.

A signal that came after the end of its call does not count, and is told under *sent*. *State
changed* counts calls after which anything differs from before: weights, buffers, modes,
`requires_grad`, gradients, hooks, attributes, random states of torch, numpy and Python, grad and
inference mode, default type, attention's flags, autocast, threads. After a kill nothing of a
process is left to differ. *Found afterwards* is `whole` where the same call gives the same numbers
as before; where a folder that two versions were saved into in turns holds all of one of them; and
where a retraining that is called again comes to the same end, bit by bit, with at most the training
under way lost (for a function: those of the refits, if these were under way). Files that a killed
save had begun are never read; a save an hour later takes them away.

{(2 * chr(10)).join(parts)}
"""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--interrupts", type=int, default=INTERRUPTS)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    return parser.parse_args()


def main() -> int:
    """Measure, write, and end with 1 where there is a fault."""
    chosen = arguments()
    output = chosen.output.resolve()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "interrupts": chosen.interrupts,
        "kills": chosen.kills,
    }
    with tempfile.TemporaryDirectory() as folder:
        found = measure(chosen, Path(folder))
        os.chdir(output.anchor)
    record["summary"] = {kind: summary(outcomes) for kind, outcomes in found.items()}
    record["faults"] = {
        kind: [asdict(outcome) for outcome in outcomes if outcome.fault]
        for kind, outcomes in found.items()
    }
    write(output, "reliability", record, page(record))
    print(page(record))
    for kind, faults in record["faults"].items():
        for fault in faults:
            print(kind, fault, file=sys.stderr)
    return int(any(record["faults"].values()))


if __name__ == "__main__":
    sys.exit(main())
