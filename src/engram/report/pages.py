"""The HTML pages of a result and of a training run: figures and tables in one file each.

A :class:`Page` is built from top to bottom; :func:`result_page` and :func:`training_page` say what
stands on the two that :meth:`engram.Result.report` and :meth:`engram.Tracker.report` write.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from html import escape as escaped
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from engram.core.printable import printable
from engram.core.storage.files import write_text
from engram.errors import LikelihoodError
from engram.likelihoods import Likelihood
from engram.report.figures import (
    leverage_figure,
    loss_figure,
    loss_scatter,
    score_figure,
    score_histogram,
)
from engram.sensitivity.label_issues import label_issues
from engram.sensitivity.result import Result
from engram.tracking.held_out import HeldOut
from engram.tracking.history import QUANTILES, History

# Figures: more is finer, in a larger file
RESOLUTION = 140  # dots per inch of a picture
CSS_PIXELS_PER_INCH = 96  # by definition of CSS; the width a picture is shown at
GROUPS = 60  # of examples in the figure of scores over time, each a point of a line
MEDIAN = QUANTILES.index(0.5)  # place in what a record keeps

TOO_LARGE = (
    "Most leverages of the last update are above 1, which no consistent posterior gives: "
    "do not trust the size of the estimate; engram.verify compares some examples with the truth."
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
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 60rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin-bottom: .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 46rem; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; }
figcaption { color: #5d636d; font-size: .9rem; max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e3e5e9; }
th { color: #5d636d; font-weight: 600; border-bottom-color: #9aa0aa; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { color: #5d636d; } dd { margin: 0; font-variant-numeric: tabular-nums; }
footer { margin-top: 3rem; color: #5d636d; font-size: .85rem; }
"""


def escape(words: object) -> str:
    """The text escaped for HTML, control characters and marks of writing direction included."""
    return escaped(printable(words), quote=True)


class Page:
    """A page of HTML, built from top to bottom; all text is escaped.

    Example:
        >>> page = Page("a < b").text("1 & 2")
        >>> "a &lt; b" in page.html(), "1 &amp; 2" in page.html()
        (True, True)
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> Page:
        """Begin a section."""
        return self._add(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> Page:
        """A paragraph."""
        return self._add(f"<p>{escape(text)}</p>")

    def facts(self, values: Mapping[str, object]) -> Page:
        """A list of names with one value each."""
        rows = (f"<dt>{escape(k)}</dt><dd>{escape(shown(v))}</dd>" for k, v in values.items())
        return self._add(f"<dl>{''.join(rows)}</dl>")

    def table(self, frame: pd.DataFrame) -> Page:
        """A table with its index as the first column."""
        names = [str(frame.index.name or ""), *map(str, frame.columns)]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(shown(v))}</td>" for v in row) + "</tr>"
            for row in frame.itertuples()
        )
        return self._add(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def figure(self, figure: Figure, caption: str) -> Page:
        """A figure with its caption, embedded as PNG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=RESOLUTION)
        width = round(CSS_PIXELS_PER_INCH * figure.get_figwidth())
        data = base64.b64encode(buffer.getvalue()).decode()
        title = escape(caption)
        return self._add(
            f'<figure><img width="{width}" alt="{title}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def _add(self, part: str) -> Page:
        self._parts.append(part)
        return self

    def html(self) -> str:
        """The whole page."""
        title = escape(self.title)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            + "\n".join(self._parts)
            + "\n</body>\n</html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page, whole; folders are made."""
        return write_text(path, self.html())


def shown(value: object) -> str:
    """A value for reading: four digits, a dash for what is not there."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _verdict_line(result: Result) -> str:
    counts = ", ".join(f"{count:,} {name}" for name, count in result.verdict.counts.items())
    return f"{result.verdict.level}: {result.verdict.line}; examples: {counts}"


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
            "verdict, how far to trust it": _verdict_line(result),
        }
    )
    for words in (*result.verdict.reasons, *result.basis.not_estimated):
        page.text(str(words))
    page.heading("Scores").figure(
        score_histogram(result), "How far each example moves its prediction."
    )
    page.heading("Losses").figure(
        loss_scatter(result), "On the line, the example makes no difference."
    )
    page.heading("The model depends most on").table(result.top(count))
    _labels_and_metrics(page, result, count)
    page.heading("Diagnostics").facts(result.diagnostics.to_dict())
    settings = result.provenance.get("settings", {})
    made = {k: v for k, v in result.provenance.items() if k != "settings"}
    return page.heading("Made with").facts(made | settings).write(path)


def _labels_and_metrics(page: Page, result: Result, count: int) -> None:
    """Which labels to look at, and how good predictions are, as far as the result knows them."""
    try:
        table = label_issues(result, count)
    except LikelihoodError:  # no classes, or a loss that only its name is left of
        table = result.top(count, by="loo_loss")
    page.heading("The other examples contradict most").table(table)
    if isinstance(result.basis.likelihood, Likelihood):
        page.heading("Predictions, on the training data and under leave-one-out")
        page.table(result.metrics())


def top_examples(
    history: History, details: pd.DataFrame | None, count: int, by: str = "score"
) -> pd.DataFrame:
    """The examples that come first in a column at the last update, with what else is known."""
    if details is None:
        finite = [i for i, record in enumerate(history) if record.finite]
        scores = history.scores[finite[-1]].numpy()
        details = pd.DataFrame({"score": scores}).rename_axis("example")
    shown = details.drop(columns="status", errors="ignore")  # a number for code; all have a score
    return shown.sort_values(by, ascending=False, kind="stable").head(count)


def training_page(
    history: History,
    details: pd.DataFrame | None,
    held_out: HeldOut | None,
    count: int,
    path: Path,
) -> Path:
    """Write the page of a training run.

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
    if details is not None and "loo_loss" in details:
        page.heading("Examples that the others contradict most")
        page.table(top_examples(history, details, count, by="loo_loss"))
    frame = history.to_frame()
    shown = frame.drop(columns=[c for c in frame if frame[c].isna().all()])
    page.heading("History").table(shown.astype(object).where(shown.notna(), math.nan))
    return page.write(path)
