"""How sure an audit may be of its count: ``python -m benchmarks.audit.sureness``.

Small sets, eight seeds each, and the larger ones of the other pages: stock models, trained once and
once on a half. What a fitted chance is worth (``engram.auditing.called``) is found by maximum
likelihood, and looked at on sets that it was not found on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.audit import data
from benchmarks.audit.data import Pair
from benchmarks.audit.page import summary
from benchmarks.audit.runs import Case, run
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from engram.auditing.called import COVERED, RIGHT, SMALLEST, WORTH

SEEDS = range(8)
NOISES = ("symmetric", "dependent")
TEXT = """# How many of the labels that are called wrong are

A tenth of the labels made wrong, eight seeds of each small set and kind of noise, one of the larger
ones; {count} runs in which some label was called wrong. {conditions} Run and written by
`python -m benchmarks.audit.sureness --runs FOLDER --others FOLDER`.

What the fitted model of label noise says of itself is worth {worth:.0f} looks at a label, however
many it calls wrong, and {right:.2f} right labels among them are taken for seen (maximum likelihood,
each set counting alike). `engram.auditing.called` has {used:.0f} and {seen:.1f}: its intervals of
90 % have the true number in {own:.0%} of these runs. In the table each set is looked at with
numbers found on the others.

{rows}

Over the sets it has it in {covered:.0%}. Before, the mean of the chances was stated, and no
interval. The runs of a set are the same data with other labels made wrong, so that they err
together.
"""


def part_of(read: Callable[[], Pair], count: int) -> Callable[[], Pair]:
    """Some examples of a set."""

    def read_part() -> Pair:
        inputs, labels = read()
        some = np.random.default_rng(5).permutation(len(labels))[:count]
        return inputs[some], labels[some]

    return read_part


def iris() -> Pair:
    """scikit-learn's table of 150 flowers of three kinds."""
    from sklearn.datasets import load_iris

    return load_iris(return_X_y=True)


def pixels() -> Pair:
    """scikit-learn's digits as a table of 64 columns."""
    images, labels = data.digits()
    return images.reshape(len(images), -1).astype(float), labels


SMALL: dict[str, Callable[[], Pair]] = {
    "tabular": data.cancer,
    "wine": data.wine,
    "iris": iris,
    "blobs1k": part_of(data.blobs, 1000),
    "spam1k": part_of(data.spam, 1500),
    "trec1k": part_of(data.trec, 1500),
    "gauss1k": part_of(data.gauss2, 1000),
    "digitab": part_of(pixels, 800),
}


@dataclass(frozen=True)
class Count:
    """Labels that a run calls wrong.

    Args:
        name: of the set.
        called: how many.
        chance: mean of their chances.
        wrong: how many of them are.
    """

    name: str
    called: int
    chance: float
    wrong: int


def counts(folders: list[Path]) -> list[Count]:
    """Of all runs with wrong labels of which some were called."""
    found = []
    paths = {path.name: path for folder in folders for path in folder.glob("*.npz")}  # each once
    for _, path in sorted(paths.items()):
        row = summary(path, with_folds=False)
        cut = row["cut_off"]
        if row["noise"] != "none" and cut["count"]:
            wrong = round(cut["true"] * cut["count"])
            found.append(Count(row["data"], cut["count"], cut["chance"], wrong))
    return found


def shape(worth: float, right: float, one: Count) -> tuple[float, float]:
    """Parameters of the Beta distribution of the share."""
    looks = one.called * worth / (one.called + worth)
    return max(looks * one.chance, SMALLEST), looks * (1 - one.chance) + right


def fitted(rows: list[Count]) -> tuple[float, float]:
    """The worth of a chance, and the right labels taken for seen, each set counting alike."""
    from scipy.optimize import minimize
    from scipy.stats import betabinom

    names = [row.name for row in rows]

    def surprise(logs: np.ndarray) -> float:
        worth, right = np.exp(logs)
        each = (
            betabinom.logpmf(row.wrong, row.called, *shape(worth, right, row))
            / names.count(row.name)
            for row in rows
        )
        return -float(sum(each))

    worth, right = np.exp(minimize(surprise, np.log([20.0, 1.0]), method="Nelder-Mead").x)
    return float(worth), float(right)


def held_out(rows: list[Count]) -> list[dict[str, Any]]:
    """Each set with what was found on the others."""
    from scipy.stats import betabinom

    found = []
    for name in sorted({row.name for row in rows}):
        worth, right = fitted([row for row in rows if row.name != name])
        own = [row for row in rows if row.name == name]
        numbers = [betabinom(row.called, *shape(worth, right, row)) for row in own]
        tails = ((1 - COVERED) / 2, (1 + COVERED) / 2)
        ends = [[float(number.ppf(tail)) for tail in tails] for number in numbers]
        within = [low <= row.wrong <= high for row, (low, high) in zip(own, ends, strict=True)]
        widths = [(high - low) / row.called for row, (low, high) in zip(own, ends, strict=True)]
        off = [abs(n.mean() - row.wrong) / row.called for n, row in zip(numbers, own, strict=True)]
        plain = [abs(row.chance - row.wrong / row.called) for row in own]
        found.append(
            {
                "set": name,
                "runs": len(own),
                "worth": worth,
                "right": right,
                "within": float(np.mean(within)),
                "width": float(np.mean(widths)),
                "off": float(np.mean(off)),
                "off_before": float(np.mean(plain)),
            }
        )
    return found


def _is_within(row: Count) -> bool:
    """Whether the interval that an audit states has the true number."""
    from scipy.stats import betabinom

    number, tail = betabinom(row.called, *shape(WORTH, RIGHT, row)), (1 - COVERED) / 2
    return bool(number.ppf(tail) <= row.wrong <= number.ppf(1 - tail))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("build/audit-seeds"))
    parser.add_argument("--others", type=Path, help="folder of `python -m benchmarks.audit`")
    options = parser.parse_args()
    for seed in SEEDS:
        for name, read in SMALL.items():
            for noise in NOISES:
                print(name, noise, seed, file=sys.stderr, flush=True)
                run(Case(name, noise, seed), read, options.runs, False)
    folders = [options.runs] + ([] if options.others is None else [options.others])
    rows = counts(folders)
    worth, right = fitted(rows)
    sets = held_out(rows)
    names = ("within", "width", "off", "off_before")
    lines = [[s["set"], str(s["runs"]), *(f"{s[name]:.2f}" for name in names)] for s in sets]
    header = ["", "runs", "true number within", "width / called", "off by", "before"]
    covered = float(np.mean([s["within"] for s in sets]))
    setting = environment(0)
    text = TEXT.format(
        count=len(rows),
        conditions=conditions(setting),
        worth=worth,
        right=right,
        rows=table(header, lines),
        covered=covered,
        used=WORTH,
        seen=RIGHT,
        own=float(np.mean([_is_within(row) for row in rows])),
    )
    record = {"environment": setting, "worth": worth, "right": right, "sets": sets}
    record["runs"] = [vars(row) for row in rows]
    write(RESULTS, "audit-sureness", record, text)


if __name__ == "__main__":
    main()
