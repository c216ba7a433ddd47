"""The page of a training run: figures, history and the examples it depends on most."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from engram.report.figures import leverage_figure, loss_figure, score_figure
from engram.report.page import Page
from engram.tracking.held_out import HeldOut
from engram.tracking.history import QUANTILES, History

GROUPS = 60  # of examples, in the figure of the scores
MEDIAN = QUANTILES.index(0.5)  # place in what a record keeps
TOO_LARGE = (
    "Most leverages of the last update are above 1, which no consistent posterior gives: "
    "do not trust the size of the estimate. Fit one with engram.laplace and compare."
)
UNITS = (
    "Losses are means in nats per example. A sensitivity is without the example minus with it; "
    "the score is the L1 norm of the change of the example's prediction."
)

BY_ALL = "The estimate uses training data only."
BY_TWIN = (
    "The estimate uses training data only: a second training without {:,} of the examples. The "
    "scores and losses of single examples below are the posterior's at each update."
)


def top_examples(history: History, details: pd.DataFrame | None, count: int) -> pd.DataFrame:
    """The examples with the highest score at the last update, with what else is known of them."""
    if details is None:
        finite = [i for i, record in enumerate(history) if record.finite]
        scores = history.scores[finite[-1]].numpy()
        details = pd.DataFrame({"score": scores}).rename_axis("example")
    shown = details.drop(columns="status", errors="ignore")  # a number for code; all have a score
    return shown.sort_values("score", ascending=False, kind="stable").head(count)


def training_page(
    history: History,
    details: pd.DataFrame | None,
    held_out: HeldOut | None,
    count: int,
    path: Path,
) -> Path:
    """Write the page.

    Args:
        history: with at least one update.
        details: one row per example of the last update, with a column ``score``.
        held_out: examples left out of a twin; None if the estimate is the posterior's.
        count: how many of the top examples are listed.
        path: of the file.
    """
    figure = loss_figure(history)
    best, last = history.best, history.records[-1]
    assert best is not None
    page = Page("A training and its sensitivities").text(UNITS)
    page.facts(
        {
            "updates": len(history),
            "lowest estimate of the test loss": f"{best.estimate:.4f} at step {best.step}",
            "last estimate": f"{last.estimate:.4f} at step {last.step}",
            "updates that were not finite": sum(not record.finite for record in history),
        }
    )
    if last.leverage and last.leverage[MEDIAN] > 1:
        page.text(TOO_LARGE)
    origin = BY_ALL if held_out is None else BY_TWIN.format(len(held_out.indices))
    page.heading("Loss").figure(figure, origin)
    page.heading("Sensitivities over time").figure(
        score_figure(history, GROUPS),
        "Examples sorted by the last update and put into groups; a line is one update.",
    )
    if any(record.leverage for record in history):
        page.heading("Leverage").figure(
            leverage_figure(history),
            "The line is the median, the bands hold 50 % and 90 % of the examples computed.",
        )
    page.heading("Examples that the model depends on most")
    page.table(top_examples(history, details, count))
    frame = history.to_frame()
    shown = frame.drop(columns=[c for c in frame if frame[c].isna().all()])
    page.heading("History").table(shown.astype(object).where(shown.notna(), math.nan))
    return page.write(path)
