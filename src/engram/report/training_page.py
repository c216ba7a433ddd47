"""The page of a training: its losses over time, and what the last update says of each example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engram.errors import DataError
from engram.report.page import Alert, Curves, Examples, Headline, Making, PageData
from engram.report.result_page import EXPLANATIONS, loss_interval, result_data
from engram.sensitivity.result import Result
from engram.tracking.held_out import HeldOut
from engram.tracking.history import QUANTILES, History, Record
from engram.tracking.streaming import Epoch

SUSPECT = "suspect"
SUSPECTS = 0.01  # share of the examples that are called so: enough to look at, few enough to do it
MEDIAN = QUANTILES.index(0.5)  # place in what a record keeps
TOO_LARGE = (
    "Most leverages of the last update are above 1, which no consistent posterior gives: "
    "do not trust the size of the estimate; engram.verify compares some examples with the truth."
)
BY_ALL = "The estimate uses training data only."
BY_TWIN = (
    "The estimate uses training data only: a second training without {:,} of the examples. The "
    "scores and losses of single examples are the posterior's at each update."
)


def training_data(
    history: History,
    latest: Result | Epoch | None = None,
    held_out: HeldOut | None = None,
    **shown: Any,
) -> PageData:
    """What a training says, for a page.

    Args:
        history: with at least one update that was finite.
        latest: what the last update, or the last streamed epoch, says of each example.
        held_out: examples left out of a twin; None if the estimate is the posterior's.
        shown: ids, classes, images, texts and rows, as in
            :func:`engram.report.result_page.result_data`.
    """
    check_updates(history)
    if isinstance(latest, Result):
        data = result_data(latest, **shown)
    else:
        data = _without_result(history, latest, shown)
    data = _with_suspects(data, history)
    headline = _headline(history, data.headline)
    return replace(data, headline=headline, curves=history_curves(history, held_out))


def _with_suspects(data: PageData, history: History) -> PageData:
    """The examples that were expensive all along: what a net memorises it has paid for before."""
    losses = history.mean_loo_loss().numpy()
    if len(losses) != len(data.examples) or np.isnan(losses).all():
        return data
    count = max(1, round(SUSPECTS * len(losses)))
    first = np.argsort(-np.where(np.isnan(losses), -np.inf, losses), kind="stable")[:count]
    flag = np.isin(np.arange(len(losses)), first)
    alert = Alert(
        f"{count:,} suspect{'' if count == 1 else 's'}",
        "Left out, they cost most over the whole training: wrong labels gather here.",
        flag=SUSPECT,
    )
    examples = replace(data.examples, flags={SUSPECT: flag, **data.examples.flags})
    return replace(data, examples=examples, alerts=[alert, *data.alerts])


def history_curves(history: History, held_out: HeldOut | None = None) -> Curves:
    """Losses, scores and leverages over the updates."""
    frame, best = history.to_frame(), history.best
    assert best is not None
    has_leverage = all(record.leverage for record in history)
    low, high = _band(history) if held_out is None else (None, None)
    return Curves(
        frame.index.to_numpy(),
        frame["train"].to_numpy(float),
        frame["estimate"].to_numpy(float),
        loo_low=low,
        loo_high=high,
        validation=frame["validation"].to_numpy(float),
        stop=best.step,
        stop_reason=f"Lowest estimate, {best.estimate:.4f}, at step {best.step}.",
        step_name="step",
        scores=history.score_matrix().numpy(),
        leverage=[record.leverage for record in history] if has_leverage else None,
        sentence=BY_ALL if held_out is None else BY_TWIN.format(len(held_out.indices)),
    )


def _band(history: History) -> tuple[list[float], list[float]]:
    """1.96 standard errors of each update's mean over examples; NaN where losses are not known."""
    ends = []
    for row in history.loo_losses.matrix():  # row by row: the matrix may be a large file
        known = row[row.isfinite()]
        ends.append(loss_interval(known, torch.ones(len(known))))
    return [low for low, _ in ends], [high for _, high in ends]


def _without_result(history: History, epoch: Epoch | None, shown: dict[str, Any]) -> PageData:
    """What the visits of an epoch, or the last update that was finite, say of each example."""
    record = [number for number, found in enumerate(history) if found.finite][-1]
    last, losses = history.records[record], history.loo_losses[record].numpy()
    columns: list[Any] = [np.full(len(losses), np.nan), losses, history.scores[record].numpy()]
    if epoch is not None:
        columns = [np.asarray(getattr(epoch, name)) for name in ("loss", "loo_loss", "score")]
    ids = shown.get("ids")
    kept = {name: value for name, value in shown.items() if name not in ("ids", "classes")}
    examples = Examples(list(range(len(losses)) if ids is None else ids), *columns, **kept)
    headline = Headline("", "", last.train, last.estimate)
    return PageData(headline, examples, making=Making(EXPLANATIONS))


def _headline(history: History, of_examples: Headline) -> Headline:
    best, last = history.best, history.records[-1]
    assert best is not None
    lost = sum(not record.finite for record in history)
    reasons = [*of_examples.reasons]
    if last.leverage and last.leverage[MEDIAN] > 1:
        reasons.insert(0, TOO_LARGE)
    if lost:
        reasons.append(f"{lost} of {len(history)} updates gave no finite estimate.")
    return replace(
        of_examples,
        title="A training and its memory",
        sentence=_sentence(history, best, last),
        train_loss=last.train,
        loo_loss=last.estimate,
        reasons=reasons,
    )


def _sentence(history: History, best: Record, last: Record) -> str:
    if best is last:
        return (
            f"The loss on unseen data is near {last.estimate:.4f} after {len(history)} updates, "
            "the lowest so far."
        )
    return (
        f"Unseen data would have been predicted best at step {best.step}, with a loss near "
        f"{best.estimate:.4f}; after {len(history)} updates the estimate is {last.estimate:.4f}."
    )


def check_updates(history: History) -> None:
    """DataError where nothing of a training can be shown."""
    if any(record.finite for record in history):
        return
    if len(history) == 0:
        raise DataError("at least one update", "an empty history", "call tracker.update() first")
    raise DataError(
        "at least one update with a finite estimate",
        f"{len(history)} without: training diverged, or the optimizer had no state yet",
        "lower the learning rate, or update after the optimizer's first step",
    )
