"""Find what is to be known of a setting, or print it in a few numbers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.practical.settings import SETTINGS
from benchmarks.practical.summary import summary
from benchmarks.practical.truths import FOLDER, epochs, folds, truth

STEPS = {"truth": truth, "folds": folds, "epochs": epochs, "summary": summary}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.practical", description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("names", nargs="*", choices=[*SETTINGS, []], help="all where none is named")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where it is kept")
    chosen = parser.parse_args()
    for name in chosen.names or SETTINGS:
        found = STEPS[chosen.step](name, chosen.folder)
        if chosen.step == "summary":
            print(name, json.dumps(found, indent=1), flush=True)
        else:
            print(name, found if chosen.step != "epochs" else "epochs done", sep="\n", flush=True)


if __name__ == "__main__":
    main()
