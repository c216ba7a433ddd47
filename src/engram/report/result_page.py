"""The page of a result: what it says, how far to trust it, and its most sensitive examples."""

from __future__ import annotations

from pathlib import Path

from engram.report.figures import loss_scatter, score_histogram
from engram.report.page import Page
from engram.sensitivity.result import Result


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
    page.heading("Scores").figure(
        score_histogram(result), "How far each example moves its prediction."
    )
    page.heading("Losses").figure(
        loss_scatter(result), "On the line, the example makes no difference."
    )
    page.heading("The model depends most on").table(result.top(count))
    page.heading("The other examples contradict most").table(result.top(count, by="loo_loss"))
    page.heading("Diagnostics").facts(result.diagnostics.to_dict())
    settings = result.provenance.get("settings", {})
    made = {k: v for k, v in result.provenance.items() if k != "settings"}
    return page.heading("Made with").facts(made | settings).write(path)
