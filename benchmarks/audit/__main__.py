"""python -m benchmarks.audit: run what is missing, then write docs/results/audit.{md,json}."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.audit.data import BENCHMARK, CALIBRATION
from benchmarks.audit.runs import Case, run

NOISES = ("symmetric", "dependent")
SEEDS = {"digits": (0, 1, 2), "tabular": (0, 1, 2), "trec": (0, 1, 2)}  # the others: one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("build/audit"), help="folder of arrays")
    parser.add_argument("--calibration", action="store_true", help="the other data sets only")
    parser.add_argument("--only", nargs="*", help="data sets")
    options = parser.parse_args()
    sets = CALIBRATION if options.calibration else BENCHMARK
    for name, read in sets.items():
        if options.only and name not in options.only:
            continue
        noises = (*NOISES, "none") if options.calibration or name in ("trec", "fashion") else NOISES
        for noise in noises:
            for seed in SEEDS.get(name, (0,)) if noise != "none" else (0,):
                case = Case(name, noise, seed)
                print(case, file=sys.stderr, flush=True)
                run(case, read, options.runs, folds=noise != "none" and not options.calibration)


if __name__ == "__main__":
    main()
