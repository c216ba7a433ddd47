"""Estimates of every method against the same true refits: one command, one page."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.faithfulness.figure import draw
from benchmarks.faithfulness.peers import PEERS
from benchmarks.faithfulness.run import run
from benchmarks.faithfulness.settings import SETTINGS
from benchmarks.faithfulness.table import page
from benchmarks.faithfulness.truths import CACHE, NUM_LEFT_OUT, REGIMES
from benchmarks.records import RESULTS, write
from benchmarks.timing import environment


def installed(package: str) -> str:
    """Its version, or that it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def without_values(problem: dict[str, Any]) -> dict[str, Any]:
    """What the JSON file keeps: numbers a row, not a number per example."""
    kept = {k: v for k, v in problem.items() if k != "true_score"}
    for group in ("methods", "peers"):
        rows = problem.get(group, {})
        kept |= {group: {t: {k: v for k, v in r.items() if k != "values"} for t, r in rows.items()}}
    return kept


def unfinished(name: str, regime: str) -> dict[str, Any]:
    """A problem that a run which was cut short has not measured."""
    return {"setting": name, "regime": regime, "error": "the run ended before it was measured"}


def measured(chosen: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """All problems, in the order of the settings; those not done yet say so.

    Converged ones are begun first: a run that is cut short lacks the less important half.
    """
    keys = [(name, regime) for name in chosen.settings for regime in chosen.regimes]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.processes, mp_context=spawn) as pool:
        first = sorted(keys, key=lambda key: REGIMES.index(key[1]))
        jobs = {pool.submit(run, *key, chosen.seed, chosen.cache): key for key in first}
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            print(f"{len(found)} of {len(keys)}: {jobs[job]}", file=sys.stderr, flush=True)
            yield [found.get(key) or unfinished(*key) for key in keys]


def kept(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What an earlier run has left in the JSON file."""
    path = folder / "faithfulness.json"
    problems = json.loads(path.read_text())["problems"] if path.is_file() else []
    return {(p["setting"], p["regime"]): p for p in problems}


def merged(
    earlier: dict[tuple[str, str], dict[str, Any]], problems: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """These problems and, in the order of the settings, those of an earlier run beside them."""
    new = {(p["setting"], p["regime"]): p for p in problems}
    found = new | earlier | {key: p for key, p in new.items() if "error" not in p}
    keys = [(name, regime) for name in SETTINGS for regime in REGIMES]
    return [found[key] for key in keys if key in found]


def main() -> None:
    """Measure, then write the JSON file, the page and the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faithfulness", description=__doc__)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--processes", type=int, default=2, help="with one thread each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of nets and truths")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the three files")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    described, earlier = environment(chosen.seed), kept(chosen.output)
    for found in measured(chosen):
        problems = merged(earlier, found)
        record: dict[str, Any] = {
            "environment": described,
            "versions": {p: installed(p) for p in PEERS.values() if p != "torch"},
            "num_left_out": NUM_LEFT_OUT,
            "problems": problems,
        }
        small = record | {"problems": [without_values(problem) for problem in problems]}
        write(chosen.output, "faithfulness", small, page(record))
        draw(problems, chosen.output / "faithfulness.png")


if __name__ == "__main__":
    main()
