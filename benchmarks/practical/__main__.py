"""Find what is to be known of a setting, print it in a few numbers, or write the page of all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.practical.settings import SETTINGS
from benchmarks.practical.summary import page, summary
from benchmarks.practical.truths import FOLDER, epochs, folds, truth
from benchmarks.records import RESULTS, write
from benchmarks.timing import environment

TRAININGS = {"truth": truth, "folds": folds, "epochs": epochs}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.practical", description=__doc__)
    parser.add_argument("step", choices=[*TRAININGS, "summary", "page"])
    parser.add_argument("names", nargs="*", help="of settings; all of them where none is named")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where trainings are kept")
    parser.add_argument("--output", type=Path, default=RESULTS, help="of the page")
    chosen = parser.parse_args()
    names = chosen.names or list(SETTINGS)
    if unknown := set(names) - set(SETTINGS):
        parser.error(f"expected names among {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    if chosen.step in TRAININGS:
        for name in names:
            found = TRAININGS[chosen.step](name, chosen.folder)
            print(name, "done" if chosen.step == "epochs" else found, sep="\n", flush=True)
        return
    record = {
        "environment": environment(seed=0),
        "settings": [summary(name, chosen.folder) for name in names],
    }
    if chosen.step == "page":
        write(chosen.output, "practical", record, page(record))
    print(page(record) if chosen.step == "page" else json.dumps(record["settings"], indent=1))


if __name__ == "__main__":
    main()
