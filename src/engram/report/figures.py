"""All pictures: of a result, a training over time, a choice of the regulariser, a verification.

What is drawn asks for it (``result.report()``, ``tracker.figure()``, ...) and imports this module
then, so that nobody waits for matplotlib who draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from engram.errors import ArgumentError, DataError
from engram.evidence.correlation import Agreement
from engram.evidence.verification import Verification
from engram.report.evolution import group_means
from engram.report.training_page import check_updates
from engram.sensitivity.result import Result
from engram.tracking.history import History

INK, ACCENT, PALE = "#1b1b1b", "#c8553d", "#8a8f98"  # colours of all pictures
WIDTH, HEIGHT = 6.4, 4.0  # inches
BINS = 60  # of a histogram of scores: finer against steadier counts
LOGARITHMIC_ABOVE = 50  # examples in a bin; beside it bins with one example are only seen in logs


def _axes(title: str, x: str, y: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def score_histogram(result: Result) -> Figure:
    """How many examples have which score."""
    figure, axes = _axes("Sensitivity", "score", "examples", height=3.6)
    counts, _, _ = axes.hist(result.score[result.score.isfinite()].numpy(), bins=BINS, color=INK)
    if max(counts) > LOGARITHMIC_ABOVE:
        axes.set_yscale("log")
    return figure


def loss_scatter(result: Result) -> Figure:
    """Every example's loss with it against that without it."""
    figure, axes = _axes("Loss of every example", "with it", "without it", height=4.6)
    known = result.loss.isfinite() & result.loo_loss.isfinite()  # the verdict counts the others
    loss, without = result.loss[known].numpy(), result.loo_loss[known].numpy()
    axes.plot(loss, without, ".", ms=3, color=INK, alpha=0.5)
    ends = [loss.min(), loss.max()] if len(loss) else []
    axes.plot(ends, ends, color=ACCENT, lw=0.8)
    return figure


def loss_figure(history: History) -> Figure:
    """Estimate of the test loss, training loss and validation loss against the step."""
    check_updates(history)
    frame = history.to_frame()
    figure, axes = _axes("Test loss, estimated from the training data", "step", "nats per example")
    _whole_steps(axes)
    best = history.best
    _draw_losses(axes, frame, None if best is None else best.step)
    _name_lines(figure)
    return figure


def tuning_figure(frame: pd.DataFrame, best: float) -> Figure:
    """The same losses against the strength of the regulariser, which indexes the frame."""
    figure, axes = _axes("Choice of the regulariser", "prior precision", "nats per example")
    axes.set_xscale("log")
    _draw_losses(axes, frame, best)
    _name_lines(figure)
    return figure


def _draw_losses(axes: Axes, frame: pd.DataFrame, best: float | None) -> None:
    lines = {"train": ("training", PALE, "-"), "validation": ("validation", ACCENT, "--")}
    for column, (label, colour, style) in lines.items():
        if frame[column].notna().any():
            axes.plot(frame.index, frame[column], style, color=colour, label=label)
    axes.plot(frame.index, frame["estimate"], "-o", ms=3, color=INK, label="estimate")
    if best is not None:
        axes.axvline(best, color=PALE, lw=0.8, ls=":")


def score_figure(history: History, groups: int, steps: Sequence[int] | None = None) -> Figure:
    """Mean score of groups of examples, sorted by the last update, at several updates."""
    check_updates(history)
    shown = _shown_updates(history, steps)
    figure, axes = _axes(
        "Evolution of sensitivities",
        "groups of examples, least to most sensitive at the end",
        "mean score",
    )
    means = group_means(history.score_matrix().numpy(), shown, groups)
    for position, update in enumerate(shown):
        shade = 0.25 + 0.75 * position / max(len(shown) - 1, 1)
        step = history.records[update].step
        axes.plot(means[position], color=INK, alpha=shade, label=f"step {step}")
    _name_lines(figure)
    return figure


def _shown_updates(history: History, steps: Sequence[int] | None) -> list[int]:
    """Positions of the updates with these steps; of four over the training if none are given."""
    known = {record.step: i for i, record in enumerate(history) if record.finite}
    if steps is None:
        all_known = list(known.values())
        return sorted({all_known[round(i * (len(all_known) - 1) / 3)] for i in range(4)})
    missing = [step for step in steps if step not in known]
    if missing or not len(steps):
        raise ArgumentError(
            f"steps of updates, from {', '.join(str(step) for step in list(known)[:8])}",
            ", ".join(str(step) for step in missing) or "none",
            "choose among history.to_frame().index",
        )
    return sorted({known[step] for step in steps})


def leverage_figure(history: History) -> Figure:
    """Median of the leverages with bands of 50 and 90 % of them, against the step."""
    known = [record for record in history if record.leverage]
    if not known:
        raise DataError(
            "an update with leverages", "none", "call tracker.update(); streaming has no leverages"
        )
    steps = [record.step for record in known]
    low, lower, middle, upper, high = zip(*(record.leverage for record in known), strict=True)
    figure, axes = _axes("Leverage", "step", "trace of variance times Hessian")
    _whole_steps(axes)
    axes.fill_between(steps, low, high, color=PALE, alpha=0.25, lw=0, label="90 % of examples")
    axes.fill_between(steps, lower, upper, color=PALE, alpha=0.5, lw=0, label="50 % of examples")
    axes.plot(steps, middle, "-o", ms=3, color=INK, label="median")
    axes.axhline(1, color=ACCENT, lw=0.8, ls=":")
    _name_lines(figure)
    return figure


def _name_lines(figure: Figure) -> None:
    """Below the axes, where no line can be."""
    figure.legend(loc="outside lower center", ncols=4, frameon=False)


def _whole_steps(axes: Axes) -> None:
    """Steps and epochs are counted: no half of one on the axis."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def verification_figure(verification: Verification) -> Figure:
    """Estimated against true: score on the left, loss increase on the right."""
    figure = Figure(figsize=(8.4, HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2)
    found, truth = verification, verification.truth
    _scatter(left, found.estimated_score, truth.score, found.score, "deviation of the prediction")
    _scatter(
        right, found.estimated_increase, truth.increase, found.increase, "increase of the loss"
    )
    left.axhspan(0, truth.noise_floor.level, color=PALE, alpha=0.3, lw=0)
    return figure


def _scatter(axes: Axes, estimated: Tensor, true: Tensor, found: Agreement, name: str) -> None:
    axes.axline((0, 0), slope=1, color=PALE, lw=0.8, ls="--")
    axes.scatter(estimated.numpy(), true.numpy(), s=18, color=INK, alpha=0.7, lw=0)
    if math.isfinite(found.slope.value):
        axes.axline((0, 0), slope=found.slope.value, color=ACCENT, lw=1.0)
    axes.set(xlabel=f"estimated {name}", ylabel=f"true {name}")
    axes.set_title(
        f"Spearman {found.spearman.value:.3f}, Pearson {found.pearson.value:.3f}", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
