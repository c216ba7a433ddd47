"""What a page says in words and tables, for those who do not see its charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram.report.examples import Array, Examples
from engram.report.page import Curves, Effect, PageData

MOST_CLASSES = 30  # of a confusion that is shown as a table; beyond, the pairs that are most often
LARGE = 10_000  # from here numbers are shown whole
PAIRS = 20  # of classes that are listed then


@dataclass(frozen=True)
class Table:
    """Names of columns and rows of words."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def number(value: float | None) -> str:
    """Four digits, and a dash for what is not known.

    Example:
        >>> number(0.123456), number(1.2), number(123456.7), number(float("nan"))
        ('0.1235', '1.200', '123,457', '-')
    """
    if value is None or np.isnan(value):
        return "-"
    if abs(value) >= LARGE or value == 0:
        return f"{value:,.0f}"
    return f"{value:#.4g}" if abs(value) >= 1 else f"{value:.4f}"


def share(value: float, name: str) -> str:
    """An accuracy as percent, whose sign stays on its line; another measure as it is.

    Example:
        >>> share(0.912, "accuracy"), share(0.912, "r squared")
        ('91.2\\xa0%', '0.912')
    """
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if name == "accuracy" else f"{value:.3f}"


def example_table(examples: Examples, count: int) -> Table:
    """The first by leave-one-out loss, then the first by score."""
    columns = {
        "score": examples.score,
        "loss": examples.loss,
        "loss left out": examples.loo_loss,
    }
    known = {name: column for name, column in columns.items() if column is not None}
    order = list(dict.fromkeys([*_first(examples.loo_loss, count), *_first(examples.score, count)]))
    labels = {"given": examples.given, "left out": examples.predicted}
    shown = {name: column for name, column in labels.items() if column is not None}
    rows = [
        [
            str(examples.ids[place]),
            *(label_of(examples, column[place]) for column in shown.values()),
            *(number(float(column[place])) for column in known.values()),
        ]
        for place in order
    ]
    return Table(["example", *shown, *known], rows)


def _first(column: Array | None, count: int) -> list[int]:
    if column is None:
        return []
    order = np.argsort(-np.where(np.isnan(column), -np.inf, column), kind="stable")
    return [int(place) for place in order[:count]]


def label_of(examples: Examples, value: Any) -> str:
    """The name of a class, a number, or words as they are."""
    if examples.classes:
        return str(examples.classes[int(value)])
    return number(float(value)) if isinstance(value, float | np.floating) else str(value)


def effect_rows(effects: Sequence[Effect]) -> list[list[str]]:
    """A row for each class or group, the most helpful first."""
    ordered = sorted(effects, key=lambda effect: -effect.change)
    return [
        [e.name, f"{e.count:,}", number(e.change), number(e.low), number(e.high), e.level]
        for e in ordered
    ]


def curve_table(curves: Curves) -> Table:
    """Losses at each update."""
    columns = {
        "training": curves.train,
        "leave-one-out": curves.loo,
        "validation": curves.validation,
    }
    known = {
        name: np.asarray(column, dtype=np.float64)
        for name, column in columns.items()
        if column is not None
    }
    rows = [
        [str(step), *(number(float(column[place])) for column in known.values())]
        for place, step in enumerate(curves.steps)
    ]
    return Table([curves.step_name, *known], rows)


def metric_rows(data: PageData) -> list[list[str]]:
    """A row for each measure: on the training data, and left out."""
    return [[name, *map(number, values)] for name, values in data.metrics.items()]


def facts(data: PageData) -> list[list[str]]:
    """Versions and settings, one a row."""
    return [
        [name, number(value) if isinstance(value, float) else str(value)]
        for name, value in data.making.facts.items()
    ]


def confusion(examples: Examples) -> dict[str, Any] | None:
    """Given against predicted labels: a matrix, or the most frequent pairs of many classes."""
    if not examples.classes or examples.given is None or examples.predicted is None:
        return None
    size = len(examples.classes)
    counts = np.bincount(size * examples.given + examples.predicted, minlength=size * size)
    counts = counts.reshape(size, size)
    names = [str(name) for name in examples.classes]
    if size <= MOST_CLASSES:
        return {"names": names, "matrix": list(_shaded(counts)), "pairs": []}
    off = np.where(np.eye(size, dtype=bool), 0, counts)
    order = np.argsort(-off.ravel(), kind="stable")[:PAIRS]
    places = [(int(place) // size, int(place) % size) for place in order]
    pairs = [
        {"given": g, "predicted": p, "count": int(off[g, p])} for g, p in places if off[g, p] > 0
    ]
    return {"names": names, "matrix": [], "pairs": pairs}


def _shaded(counts: Array) -> Iterator[list[dict[str, int]]]:
    """Cells with a shade from 0 to 100: of the errors among errors, of the others in their row."""
    errors = counts - np.diag(np.diag(counts))
    most = max(int(errors.max(initial=0)), 1)
    for place, row in enumerate(counts):
        total = max(int(row.sum()), 1)
        yield [
            {
                "count": int(count),
                "shade": round(100 * (count / total if other == place else (count / most) ** 0.5)),
            }
            for other, count in enumerate(row)
        ]
