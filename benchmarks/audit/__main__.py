"""python -m benchmarks.audit: run what is missing, then write docs/results/audit.{md,json}."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.audit.cut_off import write_cut_offs
from benchmarks.audit.data import BENCHMARK, CALIBRATION
from benchmarks.audit.page import write_results
from benchmarks.audit.runs import Case, run
from benchmarks.records import RESULTS

LOOKED_AT = Path(__file__).with_name("looked_at.md")  # what was seen on data as it is
NOISES = ("symmetric", "dependent")
SEEDS = {"tabular": (0, 1, 2)}  # the others: one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("build/audit"), help="folder of arrays")
    parser.add_argument("--calibration", action="store_true", help="the other data sets only")
    parser.add_argument("--images", type=int, help="fewer of Fashion-MNIST and CIFAR-10")
    parser.add_argument("--epochs", type=int, help="of every training, in place of the recipe's")
    parser.add_argument("--no-folds", action="store_true", help="of all sets, without five folds")
    parser.add_argument("--cut-off", action="store_true", help="write its page from what is there")
    parser.add_argument("--page", action="store_true", help="write the page from what is there")
    parser.add_argument("--only", nargs="*", help="data sets")
    options = parser.parse_args()
    if options.page:
        write_results(options.runs, RESULTS, LOOKED_AT.read_text())
        return
    if options.cut_off:
        write_cut_offs(options.runs, RESULTS)
        return
    sets = CALIBRATION if options.calibration else BENCHMARK
    sets = {**BENCHMARK, **CALIBRATION} if options.no_folds else sets
    without = options.calibration or options.no_folds
    for name, read in sets.items():
        if options.only and name not in options.only:
            continue
        noises = (*NOISES, "none") if without or name in ("trec", "fashion") else NOISES
        for noise in noises:
            for seed in SEEDS.get(name, (0,)) if noise != "none" else (0,):
                case = Case(name, noise, seed)
                print(case, file=sys.stderr, flush=True)
                folds = noise != "none" and not without
                run(case, read, options.runs, folds, (options.images, options.epochs))


if __name__ == "__main__":
    main()
