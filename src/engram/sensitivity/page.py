"""The page of a result: what it says, how far to trust it, and its most sensitive examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from engram.report.page import Page

if TYPE_CHECKING:
    from engram.sensitivity.result import Result

INK, ACCENT = "#1b1b1b", "#c8553d"
BINS, MANY = 60, 50


def _histogram(result: Result) -> Figure:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    counts, _, _ = axes.hist(result.score[result.score.isfinite()].numpy(), bins=BINS, color=INK)
    axes.set(title="Sensitivity", xlabel="score", ylabel="examples")
    if max(counts) > MANY:  # else the few examples with high scores could not be seen
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _losses(result: Result) -> Figure:
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    known = result.loss.isfinite() & result.loo_loss.isfinite()  # the verdict counts the others
    loss, without = result.loss[known].numpy(), result.loo_loss[known].numpy()
    axes.plot(loss, without, ".", ms=3, color=INK, alpha=0.5)
    ends = [loss.min(), loss.max()] if len(loss) else []
    axes.plot(ends, ends, color=ACCENT, lw=0.8)
    axes.set(title="Loss of every example", xlabel="with it", ylabel="without it")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _verdict(result: Result) -> str:
    counts = ", ".join(f"{count:,} {name}" for name, count in result.verdict.counts.items())
    return f"{result.verdict.level}; examples: {counts}"


def result_page(result: Result, count: int, path: Path) -> Path:
    """Write the page with the first ``count`` examples by score and by leave-one-out loss."""
    page = Page(f"Sensitivities of {result.num_data:,} examples")
    unit = result.basis.loss_unit
    page.text(
        f"A deviation is without the example minus with it. Losses are in {unit} per example."
    )
    page.facts(
        {
            "mean loss on the training data": f"{result.train_nll:.4f}",
            "mean leave-one-out loss, the estimate of the test loss": f"{result.loo_nll:.4f}",
            "verdict, how far to trust it": _verdict(result),
        }
    )
    for reason in result.verdict.reasons:
        page.text(str(reason))
    page.heading("Scores").figure(_histogram(result), "How far each example moves its prediction.")
    page.heading("Losses").figure(_losses(result), "On the line, the example makes no difference.")
    page.heading("The model depends most on").table(result.top(count))
    page.heading("The other examples contradict most").table(result.top(count, by="loo_loss"))
    page.heading("Diagnostics").facts(result.diagnostics.to_dict())
    settings = result.provenance.get("settings", {})
    made = {k: v for k, v in result.provenance.items() if k != "settings"}
    return page.heading("Made with").facts(made | settings).write(path)
