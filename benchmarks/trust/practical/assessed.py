"""What ``engram.assess`` adds to the verdict of nets that were stopped, on nets of the study.

``python -m benchmarks.trust.practical.assessed NAMES``: one recorded training each, its estimate
along the record and the one from its end, the verdict and the assessment of both, beside the truth.
Nets that are not named stay as they are in the record.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import engram
from benchmarks.practical.estimates import Watched
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from benchmarks.trust.practical.estimates import WAYS, estimated, held_against
from benchmarks.trust.practical.fit import (
    BAD_RANKING,
    BAD_SIZE,
    GOOD_RANKING,
    GOOD_SIZE,
    factor,
    is_bad,
    is_good,
)
from benchmarks.trust.practical.page import share
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import kept_truths, truth
from benchmarks.trust.runs import rounded
from engram.evidence.assess import measured
from engram.trust.aspects import LEVELS
from engram.trust.thresholds import LINEARISATION, RANKS, SIZES
from engram.trust.verdict import Rule

NAME = "trust-assess"
BUDGET = 50  # passes over the data
RECORDED = tuple(way for way in WAYS if way.recorded and way.structure == "kronecker")
SIGNALS = ("rank_disagreement", "size_disagreement", "linearisation")
# Rules that are put on top of a verdict; `assess` has the second for estimates along a record, the
# third for such as are from the end
JUDGED: dict[str, tuple[Rule, ...]] = {
    "its own": (),
    "and the tangent": (LINEARISATION,),
    "and the second opinion": (LINEARISATION, RANKS, SIZES),
}


def rows_of(name: str, budget: int) -> list[dict[str, Any]]:
    """Both ways on the first training of a setting, with what an assessment says."""
    setting, known, watched = SETTINGS[name], truth(name), Watched()
    data, began = setting.split().data, time.process_time()
    model = setting.train(0, watched)
    trained = time.process_time() - began
    found = []
    for way in RECORDED:
        result, posterior = estimated(model, data, way, watched.training)
        began = time.process_time()
        said = engram.assess(model, data, result, posterior, budget=budget, progress=False)
        spent = (time.process_time() - began) / trained
        row = held_against(result, known)
        about = {"setting": name, "way": way.name, "budget": budget}
        numbers = {key: row[key] for key in ("ranking", "size", "mean")} | measured(said.signals)
        levels = {"plain": result.verdict.level}
        found.append(about | levels | rounded(numbers | {"cost": spent}))
    return found


def page(record: Mapping[str, Any]) -> str:
    """How often both were right, and what each signal has to do with what estimates are off by."""
    rows = record["rows"]
    nets = list(dict.fromkeys(row["setting"] for row in rows))
    costs = sorted(row["cost"] for row in rows)
    header = ["estimate", "verdict", "bad flagged", "good flagged", "called good and is"]
    levels = [
        [way.name, words, *_rates([row for row in rows if row["way"] == way.name], rules)]
        for way in RECORDED
        for words, rules in JUDGED.items()
    ]
    columns = ["estimate", "signal", "with 1 - ranking", "with the factor of sizes"]
    return f"""# What `assess` adds for nets that were stopped

{len(nets)} nets of [the study](trust-practical.md), a recorded training each;
`engram.assess(..., budget={BUDGET})` took {costs[len(costs) // 2]:.1f} trainings in the median, by
processor time. The second opinion is a step of the exact Gauss-Newton matrix with the training
time, from the end. Along a record it flags good estimates and finds no bad one, so that `assess`
judges those by the tangent alone, and says so; of estimates from the end, which are never called
good, it changes no level. *Bad* has a ranking below {BAD_RANKING} or sizes off by more than
{BAD_SIZE:g} times, *good* a ranking from {GOOD_RANKING} on and sizes within {GOOD_SIZE:g} times.
{conditions(record["environment"])}
Written by `python -m benchmarks.trust.practical.assessed`.

{table([*header, "good / caution / unreliable"], levels)}

Rank correlation over nets of what was measured with what estimates are off by; a signal that tells
good from bad has one near 1:

{table(columns, _correlations(rows))}

Every estimate:

{table(["net", "estimate", "ranking", "size", *SIGNALS, *JUDGED], _all(rows))}
"""


def level(row: Mapping[str, Any], rules: Sequence[Rule]) -> str:
    """The worst of the verdict's own level and of rules on what was measured."""
    own = LEVELS.index(row["plain"])
    return LEVELS[max([own, *(rule.level(row[rule.signal]) for rule in rules)])]


def _rates(rows: Sequence[Mapping[str, Any]], rules: Sequence[Rule]) -> list[str]:
    bad, good = ([level(r, rules) for r in rows if holds(r)] for holds in (is_bad, is_good))
    called = [row for row in rows if level(row, rules) == "good"]
    levels = [level(row, rules) for row in rows]
    return [
        share(bad, lambda n: bad[n] != "good"),
        share(good, lambda n: good[n] != "good"),
        share(called, lambda n: is_good(called[n])),
        " / ".join(str(levels.count(level)) for level in LEVELS),
    ]


def _correlations(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    errors: tuple[Callable[[Mapping[str, Any]], float], ...] = (
        lambda row: 1 - row["ranking"],
        lambda row: factor(row["size"]),
    )
    lines = []
    for way in RECORDED:
        own = [row for row in rows if row["way"] == way.name]
        for signal in SIGNALS:
            known = [row for row in own if math.isfinite(row[signal])]
            found = [
                spearmanr([row[signal] for row in known], [error(row) for row in known]).statistic
                for error in errors
            ]
            lines.append([way.name, f"`{signal}`", *(f"{value:.2f}" for value in found)])
    return lines


def _all(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    numbers = ("ranking", "size", *SIGNALS)
    return [
        [
            row["setting"],
            row["way"],
            *(f"{row[key]:.2f}" for key in numbers),
            *(level(row, rules) for rules in JUDGED.values()),
        ]
        for row in rows
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", help="to assess anew; all with a truth if none")
    parser.add_argument("--again", action="store_true", help="only the page")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    file = chosen.output / f"{NAME}.json"
    record = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not chosen.again:
        record["environment"] = environment(0)
        for name in chosen.settings or kept_truths():
            others = [row for row in record["rows"] if row["setting"] != name]
            rows, order = [*others, *rows_of(name, BUDGET)], list(SETTINGS)
            record["rows"] = sorted(rows, key=lambda row: order.index(row["setting"]))
            write(chosen.output, NAME, record, page(record))
            print(f"  {name}", flush=True)
    write(chosen.output, NAME, record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
