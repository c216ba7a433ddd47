"""Predictors from the rows of the study, each also fitted without the net that it is tried on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engram.trust.aspects import Expected
from engram.trust.expectation import AGREEMENT, GRADIENT, ONE, RATIO, TRAIN, Predictor

Row = Mapping[str, Any]
# figures of each path that a predictor takes: few, since the nets are
TAKEN = {
    "along": ((ONE, TRAIN, GRADIENT, AGREEMENT), (ONE, RATIO, AGREEMENT)),
    "at the end": ((ONE, RATIO, GRADIENT), (ONE,)),
    "not recorded": ((ONE, RATIO, GRADIENT), (ONE, RATIO, GRADIENT)),
}
RIDGE = 0.01  # per row, of figures whose deviation is 1
SMALLEST, HIGHEST = 0.02, 0.99  # of a size and a correlation: beyond, a logarithm says too much


def fitted(rows: Sequence[Row], path: str) -> Predictor:
    """Least squares over the rows of a path."""
    own = [row for row in rows if row["path"] == path]
    ranking, size = TAKEN[path]
    ranks = [math.atanh(min(max(row["ranking"], -HIGHEST), HIGHEST)) for row in own]
    sizes = [math.log(max(row["size"], SMALLEST)) for row in own]
    return Predictor(_solved(own, ranking, ranks), _solved(own, size, sizes))


def _solved(rows: Sequence[Row], names: Sequence[str], wanted: Sequence[float]) -> dict[str, float]:
    figures = np.array([[row["figures"][name] for name in names] for row in rows])
    held = RIDGE * len(rows) * np.diag([0.0, *figures[:, 1:].var(0)])
    found = np.linalg.solve(figures.T @ figures + held, figures.T @ np.array(wanted))
    return {name: float(f"{value:.3g}") for name, value in zip(names, found, strict=True)}


def foretold(rows: Sequence[Row]) -> list[Expected]:
    """What predictors say of each row that were fitted without its net."""
    kept: dict[tuple[str, str], Predictor] = {}
    found = []
    for row in rows:
        key = row["setting"], row["path"]
        if key not in kept:
            others = [other for other in rows if other["setting"] != row["setting"]]
            kept[key] = fitted(others, row["path"])
        found.append(kept[key].expected(row["figures"]))
    return found
