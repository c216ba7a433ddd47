"""Pictures of a history."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engram.errors import DataError
from engram.tracking.history import History

INK, ACCENT, PALE = "#1b1b1b", "#c8553d", "#8a8f98"


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def loss_figure(history: History) -> Figure:
    """Estimate of the test loss, training loss and validation loss against the step."""
    _check(history)
    frame = history.to_frame()
    figure, axes = _axes("Test loss, estimated from the training data", "step", "nats per example")
    lines = {"train": ("training", PALE, "-"), "validation": ("validation", ACCENT, "--")}
    for column, (label, colour, style) in lines.items():
        if frame[column].notna().any():
            axes.plot(frame.index, frame[column], style, color=colour, label=label)
    axes.plot(frame.index, frame["estimate"], "-o", ms=3, color=INK, label="estimate")
    best = history.best
    if best is not None:
        axes.axvline(best.step, color=PALE, lw=0.8, ls=":")
    axes.legend(frameon=False)
    return figure


def score_figure(history: History, groups: int) -> Figure:
    """Mean score of groups of examples, sorted by the last update, at several updates."""
    _check(history)
    matrix = history.score_matrix()
    order = matrix[-1].argsort()
    figure, axes = _axes(
        "Evolution of sensitivities",
        "groups of examples, least to most sensitive at the end",
        "mean score",
    )
    shown = sorted({round(i * (len(matrix) - 1) / 3) for i in range(4)})
    for position, update in enumerate(shown):
        parts = matrix[update][order].tensor_split(min(groups, len(order)))
        shade = 0.25 + 0.75 * position / max(len(shown) - 1, 1)
        axes.plot(
            [float(part.mean()) for part in parts],
            color=INK,
            alpha=shade,
            label=f"step {history.records[update].step}",
        )
    axes.legend(frameon=False)
    return figure


def _check(history: History) -> None:
    if not any(record.finite for record in history):
        raise DataError("at least one update", "an empty history", "call tracker.update() first")
