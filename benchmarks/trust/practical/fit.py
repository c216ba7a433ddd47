"""Predictors and thresholds from the rows of the study, each also found without a net.

A net that is judged by what was found on the others, thresholds included, says how a verdict does
on nets that it has not seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram.trust.aspects import LEVELS, Expected
from engram.trust.expectation import (
    AGREEMENT,
    GRADIENT,
    KEPT,
    ONE,
    PREDICTORS,
    RATIO,
    TRAIN,
    VISITS,
    Predictor,
)
from engram.trust.judge import foreseen
from engram.trust.thresholds import CONVERGENCE, MEAN_ALONG, RANKING_ALONG, SIZE_ALONG

Row = Mapping[str, Any]
# figures of each path that a predictor takes: few, since the nets are
TAKEN = {
    "along": ((ONE, KEPT, AGREEMENT), (ONE, KEPT)),
    "along, no visits": ((ONE, RATIO, AGREEMENT), (ONE, TRAIN, AGREEMENT)),
    "at the end": ((ONE, VISITS, GRADIENT), (ONE, TRAIN, VISITS)),
    "at the end, no visits": ((ONE, RATIO, GRADIENT), (ONE,)),
    "not recorded": ((ONE, RATIO, GRADIENT), (ONE, RATIO, GRADIENT)),
}
AT_THE_END = ("at the end", "at the end, no visits")  # sizes are never good there
UNNAMED = {"along": "along, no visits", "at the end": "at the end, no visits"}
JUDGED = "along"  # the rows that limits are chosen on: the other paths are never called good
RIDGE = 0.01  # per row, of figures whose deviation is 1
SMALLEST, HIGHEST = 0.02, 0.99  # of a size and a correlation: beyond, a logarithm says too much
# Thresholds that are tried: of 1 - ranking and of the size; that of the mean is the shipped one
RANKS_TRIED = (0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2)
SIZES_TRIED = (1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5)  # good is said to be within 1.5 times
CAUGHT = 0.9  # of the bad estimates, that are to be flagged
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


@dataclass(frozen=True)
class Limits:
    """Of what is to be expected, above which it calls for caution.

    Args:
        ranking: of 1 minus the rank correlation.
        size: of the factor.
    """

    ranking: float = RANKING_ALONG.caution
    size: float = SIZE_ALONG.caution

    def flags(self, expected: Expected) -> bool:
        """Whether an estimate is not called good."""
        known = foreseen(expected)
        return (
            known["expected_ranking"] > self.ranking
            or known["expected_size"] > self.size
            or known["expected_mean"] > MEAN_ALONG.caution
        )


SHIPPED = Limits()


@dataclass(frozen=True, eq=False)
class Said:
    """What a verdict says of a row, and by which limits."""

    row: Row
    expected: Expected
    limits: Limits = SHIPPED

    @property
    def level(self) -> int:
        """Position in LEVELS, as ``engram.trust.judge`` has it."""
        path, known = self.row["path"], foreseen(self.expected)
        if path == "not recorded":
            levels = [CONVERGENCE.level(self.row["signals"]["convergence"])]
            return max(*levels, RANKING_ALONG.level(known["expected_ranking"]))
        rules = [RANKING_ALONG]
        if path != "at the end, no visits":
            rules += [SIZE_ALONG, MEAN_ALONG]
        if any(known[rule.signal] > rule.unreliable for rule in rules):
            return LEVELS.index("unreliable")
        return int(path in AT_THE_END or self.limits.flags(self.expected))


def fitted(rows: Sequence[Row], path: str) -> Predictor:
    """Least squares over the rows of a path."""
    own = [row for row in rows if row["path"] == path]
    ranking, size = TAKEN[path]
    ranks = [math.atanh(min(max(row["ranking"], -HIGHEST), HIGHEST)) for row in own]
    sizes = [math.log(max(row["size"], SMALLEST)) for row in own]
    return Predictor(_solved(own, ranking, ranks), _solved(own, size, sizes))


def _solved(rows: Sequence[Row], names: Sequence[str], wanted: Sequence[float]) -> dict[str, float]:
    figures = np.array([[row["figures"][name] for name in names] for row in rows], ndmin=2)
    held = RIDGE * len(rows) * np.diag([0.0, *figures[:, 1:].var(0)])
    found = np.linalg.solve(figures.T @ figures + held, figures.T @ np.array(wanted))
    return {name: float(f"{value:.3g}") for name, value in zip(names, found, strict=True)}


def with_unnamed(rows: Sequence[Row]) -> list[Row]:
    """The rows, and those along a record or from its end as if no step had named its examples."""
    found = [row for row in rows if row["path"]]
    without = [
        {**row, "path": UNNAMED[row["path"]], "way": f"{row['way']}, no visits"}
        for row in found
        if row["path"] in UNNAMED
    ]
    return found + without


def shipped(rows: Sequence[Row]) -> list[Said]:
    """As engram says it."""
    return [Said(row, PREDICTORS[row["path"]].expected(row["figures"])) for row in rows]


def foretold(rows: Sequence[Row]) -> list[Said]:
    """By predictors that were fitted without the row's net, and the shipped limits."""
    kept: dict[tuple[str, str], Predictor] = {}
    found = []
    for row in rows:
        key = row["setting"], row["path"]
        if key not in kept:
            kept[key] = fitted(_without(rows, row["setting"]), row["path"])
        found.append(Said(row, kept[key].expected(row["figures"])))
    return found


def held_out(rows: Sequence[Row]) -> list[Said]:
    """The same with limits that were chosen without the net too."""
    limits = {
        name: chosen(foretold(_without(rows, name)))
        for name in dict.fromkeys(row["setting"] for row in rows)
    }
    return [Said(one.row, one.expected, limits[one.row["setting"]]) for one in foretold(rows)]


def _without(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["setting"] != name]


def chosen(said: Sequence[Said]) -> Limits:
    """Those that flag nine of ten bad estimates, and of these the fewest good ones.

    Among equals the strictest.
    """
    judged = [one for one in said if one.row["path"] == JUDGED]
    bad = [one.expected for one in judged if is_bad(one.row)]
    good = [one.expected for one in judged if is_good(one.row)]

    def gained(limits: Limits) -> tuple[bool, int]:
        caught = sum(limits.flags(expected) for expected in bad)
        return caught >= CAUGHT * len(bad), -sum(limits.flags(expected) for expected in good)

    tried = (Limits(*pair) for pair in itertools.product(RANKS_TRIED, SIZES_TRIED))
    return max(tried, key=gained)  # the first of equals
