"""Run the study of practical nets, or write its page again from the rows that were recorded."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch

from benchmarks.records import RESULTS, write
from benchmarks.timing import environment
from benchmarks.trust.practical.estimates import SEEDS, WAYS, all_rows
from benchmarks.trust.practical.fit import TAKEN, fitted
from benchmarks.trust.practical.page import page
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import truth

NAME = "trust-practical"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trust.practical", description=__doc__
    )
    parser.add_argument("truths", nargs="*", help="settings to train; all if none is named")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--structures", nargs="*", default=["kronecker", "full"])
    parser.add_argument("--again", action="store_true", help=f"only the page, from {NAME}.json")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.again:
        record = json.loads((chosen.output / f"{NAME}.json").read_text())
    else:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        for name in chosen.truths or SETTINGS:
            truth(name)
        ways = [way for way in WAYS if way.structure in chosen.structures]
        record = {"environment": environment(0), "rows": all_rows(chosen.seeds, ways)}
    write(chosen.output, NAME, record, page(record))
    for path in TAKEN:
        print(path, fitted(record["rows"], path))


if __name__ == "__main__":
    main()
