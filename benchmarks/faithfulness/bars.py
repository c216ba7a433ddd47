"""The bars that engram sets itself on converged settings, and where it misses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.faithfulness.ours import DEFAULT, KRONECKER, REFINED
from benchmarks.records import table

Row = dict[str, Any]
NAMES = {
    "score_spearman": "score, Spearman",
    "score_pearson": "score, Pearson",
    "increase_pearson": "increase, Pearson",
    "increase_ratio": "mean increase, estimated / true",
}


@dataclass(frozen=True)
class Bars:
    """Of one row of the tables.

    Args:
        smallest: of the correlations.
        largest_error: of the mean increase, relative to the true one.
    """

    smallest: Mapping[str, float]
    largest_error: float | None = None

    def met(self, metric: str, value: float) -> bool:
        """Whether a value is good enough."""
        if metric == "increase_ratio":
            return self.largest_error is None or abs(value - 1) <= self.largest_error
        return value >= self.smallest.get(metric, -1.0)

    def described(self, metric: str) -> str:
        """For the header."""
        if metric == "increase_ratio":
            return "" if self.largest_error is None else f" (within {self.largest_error:.0%})"
        return f" (>= {self.smallest[metric]})" if metric in self.smallest else ""


@dataclass(frozen=True)
class Section:
    """Bars of one row, over the settings in which the default has one of some structures.

    Args:
        title: of the table.
        row: of the problems' tables.
        structures: what the default takes there.
    """

    title: str
    row: str
    bars: Bars
    structures: tuple[str, ...] = ("full", "low_rank", "kronecker")


RANKING = {"score_spearman": 0.98, "score_pearson": 0.95}  # with Kronecker factors
EXACT = Bars({"score_spearman": 0.99, "score_pearson": 0.97, "increase_pearson": 0.98}, 0.15)
SECTIONS = (
    Section(
        f"{DEFAULT}, where that is a full matrix",
        DEFAULT,
        EXACT,
        ("full",),
    ),
    Section(
        f"{DEFAULT}, where that is the Hessian in some directions",
        DEFAULT,
        EXACT,
        ("low_rank",),
    ),
    Section(
        f"{DEFAULT}, where that is Kronecker factors",
        DEFAULT,
        Bars({**RANKING, "increase_pearson": 0.98}, 0.15),
        ("kronecker",),
    ),
    Section(REFINED, REFINED, Bars({"score_spearman": 0.995, "score_pearson": 0.99}, 0.05)),
    Section(KRONECKER, KRONECKER, Bars(RANKING)),
)


def bars(done: list[Row]) -> str:
    """A table a section: values below their bar are bold."""
    converged = [p for p in done if p["regime"] == "converged"]
    parts = ["Converged settings against the bars set in advance; **bold** misses its bar."]
    for section in SECTIONS:
        wanted = section.bars
        chosen = [p for p in converged if p["default_structure"] in section.structures]
        if not chosen:
            continue
        header = ["setting", *(name + wanted.described(m) for m, name in NAMES.items())]
        rows = [[p["title"], *_cells(p["methods"][section.row], wanted)] for p in chosen]
        parts += [f"### {section.title}", table(header, rows)]
    return "\n\n".join(parts)


def _cells(row: Row, wanted: Bars) -> list[str]:
    if "error" in row:
        return [row["error"].replace("|", "/"), *[""] * (len(NAMES) - 1)]
    cells = []
    for metric in NAMES:
        digits = 2 if metric == "increase_ratio" else 4
        text = f"{row[metric]:.{digits}f}"
        cells.append(text if wanted.met(metric, row[metric]) else f"**{text}**")
    return cells
