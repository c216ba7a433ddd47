"""Run the study of practical nets, or write its page again from the rows that were recorded.

A setting that is named is estimated anew, and its truth trained where it is not kept; all others
stay as they are in the record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RESULTS, write
from benchmarks.timing import environment
from benchmarks.trust.practical.estimates import SEEDS, WAYS, rows_of
from benchmarks.trust.practical.fit import TAKEN, fitted, with_unnamed
from benchmarks.trust.practical.page import page
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import kept_truths, truth

NAME = "trust-practical"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trust.practical", description=__doc__
    )
    parser.add_argument("settings", nargs="*", help="to estimate anew; all with a truth if none")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--structures", nargs="*", default=["kronecker"])
    parser.add_argument("--truths", action="store_true", help="only train truths not kept yet")
    parser.add_argument("--again", action="store_true", help=f"only the page, from {NAME}.json")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.truths:
        _train_truths(chosen.settings or list(SETTINGS), chosen.output)
        return
    file = chosen.output / f"{NAME}.json"
    record = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    if not chosen.again:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        record["environment"] = environment(0)
        for name in chosen.settings or kept_truths(chosen.output):
            record["rows"] = _replaced(record["rows"], name, chosen)
            write(chosen.output, NAME, record, page(record))  # what is there stays, if stopped
            print(f"  {name}", file=sys.stderr, flush=True)
    write(chosen.output, NAME, record, page(record))
    rows = with_unnamed(record["rows"])
    for path in TAKEN:
        print(path, fitted(rows, path))


def _train_truths(settings: list[str], output: Path) -> None:
    """Those that are not kept, one after the other; each is kept as soon as it is there."""
    torch.set_num_threads(1)
    for name in settings:
        began = time.process_time()
        found = truth(name, output)
        seconds = time.process_time() - began
        print(f"  {name}: increase {found.increase:.3g}, {seconds:.0f} s", flush=True)


def _replaced(
    rows: list[dict[str, Any]], name: str, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows with those of a setting anew, in the order of the settings."""
    ways = [way for way in WAYS if way.structure in chosen.structures]
    known = truth(name, chosen.output)
    found = [row for row in rows if row["setting"] != name]
    for seed in chosen.seeds:
        found += rows_of(name, known, seed, ways)
    order = list(SETTINGS)
    return sorted(found, key=lambda row: (order.index(row["setting"]), row["seed"]))


if __name__ == "__main__":
    main()
