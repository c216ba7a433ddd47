"""The study's tables: how often levels were right, and every training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.records import conditions, table
from benchmarks.trust.practical.fit import Row, foretold
from benchmarks.trust.practical.settings import SETTINGS, SUBSETS
from benchmarks.trust.practical.truths import KEEP as KEEP_SHARE
from engram.trust.aspects import LEVELS, Expected
from engram.trust.expectation import PREDICTORS
from engram.trust.judge import foreseen
from engram.trust.thresholds import ALONG_RULES, CONVERGENCE, END_RULES

RULES = {
    "along": ALONG_RULES,
    "at the end": END_RULES,
    "not recorded": END_RULES,
}
GOOD_RANKING, BAD_RANKING = 0.9, 0.7
GOOD_SIZE, BAD_SIZE = 1.5, 2.0


def factor(ratio: float) -> float:
    """How many times too large or too small."""
    return max(ratio, 1 / max(ratio, 1e-9))


def is_good(row: Row) -> bool:
    """Ranks and sizes as a person hopes for."""
    return row["ranking"] >= GOOD_RANKING and factor(row["size"]) <= GOOD_SIZE


def is_bad(row: Row) -> bool:
    """Off by more than a factor 2, or hardly a ranking."""
    return row["ranking"] < BAD_RANKING or factor(row["size"]) > BAD_SIZE


def level(row: Row, expected: Expected) -> int:
    """That of the verdict, from the rules on what is to be expected."""
    known = foreseen(expected)
    levels = [rule.level(known[rule.signal]) for rule in RULES[row["path"]]]
    if row["path"] == "not recorded":
        levels.append(CONVERGENCE.level(row["signals"]["convergence"]))
    if row["path"] == "at the end":
        levels.append(LEVELS.index("caution"))
    return max(levels)


def share(rows: Sequence[Row], holds: Callable[[int], bool]) -> str:
    """So many of them, with the share."""
    count = sum(holds(n) for n in range(len(rows)))
    return f"{count} of {len(rows)}" + (f" ({count / len(rows):.0%})" if rows else "")


class Judged:
    """Rows with the levels that a verdict gives them."""

    def __init__(self, rows: Sequence[Row], expected: Sequence[Expected]) -> None:
        self.rows = rows
        self.levels = [level(row, one) for row, one in zip(rows, expected, strict=True)]

    def among(self, holds: Callable[[Row], bool]) -> Judged:
        """Those of some rows."""
        chosen = [n for n, row in enumerate(self.rows) if holds(row)]
        found = Judged([], [])
        found.rows, found.levels = [self.rows[n] for n in chosen], [self.levels[n] for n in chosen]
        return found

    def cells(self) -> list[str]:
        """How often it was right."""
        bad, good = self.among(is_bad), self.among(is_good)
        called = [n for n in range(len(self.rows)) if self.levels[n] == 0]
        right = [self.rows[n] for n in called]
        return [
            share(bad.rows, lambda n: bad.levels[n] > 0),
            share(good.rows, lambda n: good.levels[n] > 0),
            share(good.rows, lambda n: good.levels[n] > 1),
            share(right, lambda n: is_good(right[n])),
            " / ".join(str(self.levels.count(n)) for n in range(len(LEVELS))),
        ]


def rates(record: Mapping[str, Any]) -> str:
    """Of each way, with the predictors as shipped and without the net that they are tried on."""
    rows = [row for row in record["rows"] if row["path"]]
    shipped = Judged(rows, [PREDICTORS[row["path"]].expected(row["figures"]) for row in rows])
    held_out = Judged(rows, foretold(rows))
    lines = []
    for words, judged in (("shipped", shipped), ("held out", held_out)):
        lines.append(["all", words, *judged.cells()])
        recorded = judged.among(lambda row: row["way"].startswith("recorded"))
        lines.append(["all that recorded", words, *recorded.cells()])
        for way in dict.fromkeys(row["way"] for row in rows):
            lines.append([way, words, *judged.among(lambda row, w=way: row["way"] == w).cells()])
    header = ["way", "predictors", "bad flagged", "good flagged", "good called unreliable"]
    return table([*header, "called good and is", "good / caution / unreliable"], lines)


def numbers(record: Mapping[str, Any]) -> str:
    """How far the numbers are that a verdict gives, held out."""
    rows = [row for row in record["rows"] if row["path"]]
    expected, lines = foretold(rows), []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [(r, e) for r, e in zip(rows, expected, strict=True) if r["way"] == way]
        sizes = sorted(factor(row["size"]) for row, _ in own)
        left = sorted(factor(row["size"] / one.size) for row, one in own)
        means = sorted(factor(row["mean"]) for row, _ in own)
        ranks = sorted(abs(row["ranking"] - one.ranking) for row, one in own)
        within = sum(size <= BAD_SIZE for size in sizes) / len(own)
        lines.append(
            [
                way,
                f"{len(own)}",
                f"{sorted(row['ranking'] for row, _ in own)[len(own) // 2]:.2f}",
                f"{ranks[len(own) // 2]:.2f}",
                f"{within:.0%}",
                *(f"{_at(part, 0.5):.2f}, {_at(part, 0.9):.2f}" for part in (sizes, left, means)),
            ]
        )
    header = ["way", "runs", "ranking, median", "foretold within", "sizes within 2 times"]
    off = ["sizes off by: median, 9 of 10", "by what was foretold", "mean off by"]
    return table([*header, *off], lines)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def page(record: Mapping[str, Any]) -> str:
    """The Markdown page."""
    rows = record["rows"]
    nets, ways = {row["setting"] for row in rows}, {row["way"] for row in rows}
    runs = {(row["setting"], row["seed"]) for row in rows}
    weights, losses = ([row["weights"] for row in rows], [row["losses"]["train"] for row in rows])
    return f"""# When to believe an estimate for nets as people train them: the study

{len(nets)} ways to train a net, of {len(SETTINGS)} in `benchmarks/trust/practical/settings.py`:
{kinds(rows)}; {min(weights):,} to {max(weights):,} weights, 300 to 600 examples of public data
sets, training losses of {min(losses):.3f} to {max(losses):.2f}. {len(runs)}
trainings of them were recorded with their visits and estimated in {len(ways)} ways: {len(rows)}
estimates. The truth is that of {SUBSETS} trainings or more on random {KEEP_SHARE:.0%} of the
examples, each with another seed (`engram.retrain(..., subsets=)`).
{conditions(record["environment"])} Written by `python -m benchmarks.trust.practical
--seeds 0 --structures kronecker` with ENGRAM_DATA naming the folder of the data, for the settings
whose truth had been trained; `--again` writes this page anew from the rows.

*Ranking* is the rank correlation of the leave-one-out losses with the true losses without the
example, over the square root of the truth's own reliability (by halves of the trainings): a perfect
estimate of one net stays below 1, since the truth is the mean over seeds. *Size* is the estimated
over the true increase of the losses, *mean* the estimated over the true mean loss without the
example; nets that see {KEEP_SHARE:.0%} of the data do somewhat worse than nets that leave out one,
so both come out a little low.

## How often the verdict is right

An estimate is *bad* with a ranking below {BAD_RANKING} or a size off by more than {BAD_SIZE:g}
times, *good* from {GOOD_RANKING} and within {GOOD_SIZE} times. *Flagged* is caution or unreliable.
*Held out*: predictors that were fitted without the net, all its seeds and ways. The thresholds on
what they say are the shipped ones in both, and were chosen on these rows: only the predictors are
tried on nets that they have not seen. Estimates from the end of training alone, and those of which
nothing was recorded, are never called good, which is why so many good ones are flagged among all.

{rates(record)}

## What is to be expected, and how well it is foretold

{numbers(record)}

## Every estimate

{every(rows)}
"""


def kinds(rows: Sequence[Row]) -> str:
    """How many of each kind."""
    settings = dict.fromkeys((row["kind"], row["setting"]) for row in rows)
    found = [kind for kind, _ in settings]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found))


def every(rows: Sequence[Row]) -> str:
    """One line for each way, over both seeds."""
    lines = []
    for row in rows:
        lines.append(
            [
                f"{row['setting']}, seed {row['seed']}",
                row["way"],
                f"{row['losses']['train']:.3f}",
                f"{row['true_loo']:.2f}",
                f"{row['ranking']:.2f}",
                f"{row['score_ranking']:.2f}",
                f"{row['size']:.2f}",
                f"{row['mean']:.2f}",
                LEVELS[level(row, PREDICTORS[row["path"]].expected(row["figures"]))]
                if row["path"]
                else "-",
            ]
        )
    header = ["training", "way", "training loss", "true loss without", "ranking", "of scores"]
    return table([*header, "size", "mean", "verdict"], lines)
