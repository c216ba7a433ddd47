"""Train again without groups, estimate the same with ``engram.remove``, and write the page.

Cases and seeds that are not named stay as they are in the record. Truths are trained where neither
their folder nor the record has them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.groups.estimates import estimates
from benchmarks.groups.page import page, true_changes
from benchmarks.groups.settings import CASES
from benchmarks.groups.truths import FOLDER, truth
from benchmarks.records import RESULTS, write
from benchmarks.timing import environment

NAME = "groups"
RECORDED = (0, 1)  # seeds of the trainings that are recorded and estimated


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.groups", description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases; all of them where none is named")
    parser.add_argument("--seeds", type=int, nargs="*", default=RECORDED, help="of trainings")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the truth is kept")
    parser.add_argument("--output", type=Path, default=RESULTS, help="of the page")
    chosen = parser.parse_args()
    names = chosen.names or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"expected names among {', '.join(CASES)}, got {', '.join(unknown)}")
    known = environment(seed=RECORDED[0])
    file = chosen.output / f"{NAME}.json"
    stored = json.loads(file.read_text()) if file.is_file() else {"truth": {}, "rows": []}
    anew = [(name, seed) for name in names for seed in chosen.seeds]
    rows = [row for row in stored["rows"] if (row["case"], row["seed"]) not in anew]
    rows += [row for name, seed in anew for row in _kept(name, seed, chosen)]
    order = list(CASES)
    record = {
        "environment": known,
        "seeds": list(RECORDED),
        "truth": stored["truth"] | {n: _truth(n, stored["truth"], chosen.folder) for n in names},
        "rows": sorted(rows, key=lambda row: (order.index(row["case"]), row["seed"])),
    }
    write(chosen.output, NAME, record, page(record))
    print(page(record))


def _truth(name: str, stored: dict[str, Any], folder: Path) -> Any:
    """True changes of a case: from its folder, from the record, or by training."""
    if name in stored and not (folder / f"{name}.safetensors").is_file():
        return stored[name]
    return true_changes(truth(name, folder))


def _kept(name: str, seed: int, chosen: argparse.Namespace) -> list[dict[str, object]]:
    """Estimates of one training, kept beside the truth until the page is written."""
    file = chosen.folder / f"{name}-{seed}.json"
    if not file.is_file():
        rows = estimates(name, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows))
    found: list[dict[str, object]] = json.loads(file.read_text())
    return found


if __name__ == "__main__":
    main()
