"""Run the study, or write its page again from the runs that were recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.records import RESULTS, write
from benchmarks.trust.page import page
from benchmarks.trust.study import study


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="only the page, from trust.json")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.again:
        record = json.loads((chosen.output / "trust.json").read_text())
    else:
        record = study(chosen.seed, chosen.processes)
    write(chosen.output, "trust", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
