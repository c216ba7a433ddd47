"""One figure: epochs by net and way above, growth below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

MARKS = "osD^v<>P*X"


def draw(record: dict[str, Any], path: Path) -> None:
    """Logarithmic in epochs; an epoch is the line at 1."""
    grown = bool(record["growth"])
    figure = Figure(figsize=(11, 8.5 if grown else 5), layout="constrained")
    above, *rest = figure.subfigures(1 + grown, 1, height_ratios=(3, 2)[: 1 + grown], squeeze=False)
    nets(above[0].subplots(), record)
    for (below,) in rest:
        panels = below.subplots(1, len(record["growth"]), sharey=True)
        for axes, (what, found) in zip(panels, record["growth"].items(), strict=True):
            growing(axes, what, found)
        panels[0].set_ylabel("epochs")
    figure.savefig(path, dpi=110)


def nets(axes: Axes, record: dict[str, Any]) -> None:
    """A column a net, a mark a way."""
    titles = list(dict.fromkeys(t for f in record["nets"].values() for t in f["own"]))
    for number, title in enumerate(titles):
        known = [
            (place, found["own"][title]["epochs"])
            for place, found in enumerate(record["nets"].values())
            if "epochs" in found["own"].get(title, {})
        ]
        if not known:
            continue
        ours = title.startswith("engram")
        axes.plot(
            *zip(*known, strict=True),
            MARKS[number % len(MARKS)],
            color="C0" if ours else f"C{1 + number % 9}",
            fillstyle="full" if title == "engram, Kronecker" else "none",
            markersize=9,
            label=title,
        )
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(record["nets"])), list(record["nets"]))
    axes.set_ylabel("epochs, fit included")
    axes.set_title("every training example left out, one by one", fontsize=10)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def growing(axes: Axes, what: str, found: dict[str, Any]) -> None:
    """A line a way."""
    for title, row in found.items():
        known = [(int(size), of["epochs"]) for size, of in row.items() if "epochs" in of]
        if known:
            axes.plot(*zip(*known, strict=True), "o-", markersize=4, label=title)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(what)
    axes.legend(fontsize=7)
