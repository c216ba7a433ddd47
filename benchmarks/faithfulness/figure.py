"""Estimated against true scores, a panel a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.faithfulness.ours import DEFAULT

PANELS = (("digits", "converged"), ("usps", "converged"), ("digits", "early-stopped"))
COMPARED = {DEFAULT: "C0", "laplace-torch, K-FAC, authors' formula": "C1"}


def draw(problems: list[dict[str, Any]], path: Path) -> None:
    """Both axes logarithmic; on the diagonal an estimate is right."""
    by_name = {(p["setting"], p["regime"]): p for p in problems if "true_score" in p}
    shown = [by_name[key] for key in PANELS if key in by_name]
    if len(shown) < len(PANELS):  # an earlier run's numbers by example are not kept, its figure is
        return
    figure = Figure(figsize=(4.2 * len(shown), 4.2), layout="constrained")
    for axes, problem in zip(figure.subplots(1, len(shown)), shown, strict=True):
        rows = problem["methods"] | problem["peers"]
        true = problem["true_score"]
        for title, colour in COMPARED.items():
            if "values" in rows.get(title, {}):
                axes.scatter(true, rows[title]["values"], s=12, c=colour, alpha=0.7, label=title)
        axes.axline((1e-3, 1e-3), slope=1, color="0.6", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="true score")
        axes.set_title(f"{problem['title']}\n{problem['regime']}", fontsize=9)
    figure.axes[0].set_ylabel("estimated score")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=130)
