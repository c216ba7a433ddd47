"""How many removals that are off are flagged, and how many that are right.

What is named is measured anew; all else stays as it is in the record: ``minimum``, ``stopped``,
``closed``, or nets of the study of practical nets. Those of docs/results/groups.json are judged by
today's verdict, from the signals that are kept there.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.records import RESULTS, write
from benchmarks.removal_verdicts.elsewhere import at_minimum, closed, stopped
from benchmarks.removal_verdicts.page import page
from benchmarks.removal_verdicts.recorded import NETS, practical
from benchmarks.removal_verdicts.rows import Row
from benchmarks.timing import environment

NAME = "removal-verdicts"
PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "closed": closed,
    "minimum": at_minimum,
    "stopped": stopped,
    **{name: partial(practical, name) for name in NETS},
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.removal_verdicts",
                                     description=__doc__)  # fmt: skip
    parser.add_argument("parts", nargs="*", help="to measure anew; all where none is named")
    parser.add_argument("--again", action="store_true", help="only the page")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    file = chosen.output / f"{NAME}.json"
    record = json.loads(file.read_text()) if file.is_file() else {"parts": {}}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not chosen.again:
        record["environment"] = environment(0)
        for name in chosen.parts or list(PARTS):
            record["parts"][name] = [one.plain() for one in PARTS[name]()]
            write(chosen.output, NAME, record, page(record))  # what is there stays, if stopped
            print(f"  {name}: {len(record['parts'][name])} removals", flush=True)
    write(chosen.output, NAME, record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
