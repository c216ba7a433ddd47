"""The history of a training: losses, and every example's score and leave-one-out loss.

:class:`History` keeps them; :class:`BoardWriter` sends each update to TensorBoard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.core.arguments import whole
from engram.core.storage.kinds import Kind, stored
from engram.core.storage.values import init_fields, objects, typed, wrong
from engram.errors import ArgumentError, DataError, FormatError
from engram.sensitivity.result import Result
from engram.tracking.scores import LOO_FILE, ScoreRows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FORMAT = 3  # version of the saved layout; another one is refused
LOSSES = {"train": "train_nll", "estimate": "loo_nll", "validation": "validation_nll"}  # logged as
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the leverages that a record keeps


@dataclass(frozen=True)
class Record:
    """One update. Losses are means in nats per example; NaN where they were not finite or given.

    ``leverage`` has the quantiles 5, 25, 50, 75 and 95 % of the leverages where they were
    computed; ``streamed`` says whether the examples were seen one step after the other;
    ``examples`` how many of the data the estimate is the mean of; ``ranks`` of how many processes.
    """

    step: int
    train: float
    estimate: float
    validation: float = math.nan
    leverage: tuple[float, ...] = ()
    streamed: bool = False
    examples: int = 0
    ranks: int = 1

    @classmethod
    def of_result(cls, step: int, result: Result, validation: float, ranks: int) -> Record:
        """The record of a result."""
        known = result.leverage[~result.leverage.isnan()].double()
        quantiles: list[float] = []
        if len(known):
            quantiles = known.quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
        losses = (result.train_nll, result.loo_nll, validation)
        return cls(step, *losses, tuple(quantiles), examples=result.num_data, ranks=ranks)

    @property
    def finite(self) -> bool:
        """Whether there is an estimate."""
        return math.isfinite(self.estimate)

    @property
    def diverged(self) -> bool:
        """Whether training had left the finite numbers; else a missing estimate says nothing."""
        return not math.isfinite(self.train)


class History:
    """Records in the order of the updates, with the scores and leave-one-out losses [N] of each.

    Args:
        folder: where they are written as they come; see :class:`ScoreRows`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.records: list[Record] = []
        self.scores = ScoreRows(folder)
        self.loo_losses = ScoreRows(folder, LOO_FILE)

    def add(self, record: Record, scores: Tensor, loo_losses: Tensor | None = None) -> None:
        """Append an update; numbers that could not be made, or were not, are NaN."""
        self.scores.append(scores)
        self.loo_losses.append(_nothing(scores) if loo_losses is None else loo_losses)
        self.records.append(record)

    def number(self, step: Any) -> int:
        """The step of an update to come: that after the last one, or the given one."""
        last = self.records[-1].step if self.records else -1
        return last + 1 if step is None else _in_order(step, last, None)

    def replace_step(self, record: Record, step: int) -> Record:
        """The same record under another step, where it stands."""
        place = self._index(record)
        before = self.records[place - 1].step if place else -1
        after = self.records[place + 1].step if place + 1 < len(self) else None
        step = _in_order(step, before, after)
        self.records[place] = replace(record, step=step)
        return self.records[place]

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        best, count = self.best, len(self)
        updates = f"{count} update{'' if count == 1 else 's'}"
        if best is None:
            return f"History({updates}{', none of them finite' if count else ''})"
        return f"History({updates}, lowest estimate {best.estimate:.4g} nats at step {best.step})"

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @property
    def best(self) -> Record | None:
        """The update with the lowest estimate of the test loss."""
        finite = [record for record in self.records if record.finite]
        return min(finite, key=lambda record: record.estimate) if finite else None

    def updates_since_best(self) -> int:
        """How many updates came after the best one that say something: an estimate or divergence.

        One without an estimate, such as an epoch before the optimizer had a state, decides nothing.
        """
        return sum(record.finite or record.diverged for record in self._after_best())

    def _after_best(self) -> list[Record]:
        return self.records[0 if self.best is None else self._index(self.best) + 1 :]

    def standstill(self) -> str:
        """Why training stands still since the best update, in words."""
        best, since = self.best, self.updates_since_best()
        lost = sum(record.diverged for record in self._after_best())
        level = "" if best is None else f" than {best.estimate:.4g} nats at step {best.step}"
        text = f"no lower estimate{level} in {since} update{'' if since == 1 else 's'}"
        return text + (f", {lost} of which had diverged" if lost else "")

    def _index(self, record: Record) -> int:
        return next(i for i, r in enumerate(self.records) if r is record)

    def to_frame(self) -> pd.DataFrame:
        """One row per update, indexed by step."""
        import pandas as pd

        columns = ["step", "train", "estimate", "validation", "streamed", "examples"]
        rows = [[getattr(record, name) for name in columns] for record in self.records]
        return pd.DataFrame(rows, columns=columns).set_index("step")

    def figure(self) -> Figure:
        """Estimate, training loss and validation loss against the step."""
        from engram.report.figures import loss_figure

        return loss_figure(self)

    def score_figure(self, groups: int = 60, steps: Sequence[int] | None = None) -> Figure:
        """How the sensitivities evolve: examples sorted by the last update, in groups.

        Args:
            groups: that the mean score is taken over.
            steps: of the updates that are drawn, the last of them sorting the examples; four over
                the whole training if not given.
        """
        from engram.report.figures import score_figure

        return score_figure(self, groups, steps)

    def leverage_figure(self) -> Figure:
        """Quantiles of the leverages against the step."""
        from engram.report.figures import leverage_figure

        return leverage_figure(self)

    def score_matrix(self) -> Tensor:
        """Scores over time, [updates, N]."""
        return self.scores.matrix()

    @property
    def loo_loss(self) -> Tensor:
        """Leave-one-out losses of every example over time, [updates, N]; NaN where unknown."""
        return self.loo_losses.matrix()

    def mean_loo_loss(self, first: int = 0, last: int | None = None) -> Tensor:
        """Every example's leave-one-out loss, averaged over updates, [N].

        What a net has memorised by the end has cost it something on the way.

        Args:
            first, last: steps of the updates that count, both included.

        Returns:
            Means in nats over the updates in which it was known; NaN where it was in none.
        """
        steps = [record.step for record in self.records]
        chosen = [n for n, s in enumerate(steps) if s >= first and (last is None or s <= last)]
        if not chosen:
            raise ArgumentError(
                "at least one update from step first to last",
                f"none of the {len(steps)} from {first} to {'the end' if last is None else last}",
                "update the tracker, or choose other steps",
            )
        total, count = torch.zeros(2, self.loo_losses.width, dtype=torch.float64)
        matrix = self.loo_loss
        for number in chosen:  # row by row: the matrix may be a large file
            known = matrix[number].isfinite()
            total[known] += matrix[number][known].double()
            count += known
        return (total / torch.where(count > 0, count, torch.nan)).float()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors. Scores in a folder of the user's are named, not copied."""
        if not self.scores.kept:
            return self.whole_state()
        return self._described() | {
            "folder": str(self.scores.folder),
            "digest": self.scores.digest,
            "loo_digest": self.loo_losses.digest,
        }

    def whole_state(self) -> dict[str, Any]:
        """Plain values and tensors, with all scores."""
        return self._described() | {
            "scores": self.score_matrix().clone(),
            "loo_loss": self.loo_loss.clone(),
        }

    def _described(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "records": [init_fields(record) for record in self.records],
            "width": self.scores.width,
        }

    @classmethod
    def of_state(
        cls,
        state: Any,
        folder: str | Path | None = None,
        num_data: int | None = None,
    ) -> History:
        """What :meth:`state_dict` gave; ``folder`` is where the run keeps its scores now.

        DataError where they are scores of other than ``num_data`` examples.
        """
        found = _read(state)
        if num_data is not None and found.records:
            _check_width(found.width, num_data)
        history = cls()
        history.records = list(found.records)
        place = found.folder if folder is None else folder
        if found.scores is None:
            rows = (len(history), found.width, found.digest)
            history.scores = ScoreRows.reopen(place or "", *rows)
        else:
            history.scores = ScoreRows.of_matrix(found.scores, place or None)
        history.loo_losses = found.loo_rows(history.scores)
        return history

    def save(self, folder: str | Path) -> Path:
        """Write ``history.json`` and the scores into a folder, whole; no pickle."""
        return KIND.write(self, folder)


def _nothing(like: Tensor) -> Tensor:
    return torch.full(like.shape, math.nan, dtype=torch.float32)


def _in_order(step: Any, before: int, after: int | None) -> int:
    """A whole number that is not below the one before it, nor above the one after."""
    number = whole("step", step, 0, remedy="count epochs or iterations from 0")
    if number < before or (after is not None and number > after):
        raise ArgumentError(
            f"steps that do not go back: at least {max(before, 0)}"
            + ("" if after is None else f" and at most {after}"),
            str(number),
            "count on; for a run from an earlier checkpoint load the tracker's state from there",
        )
    return number


def _check_width(width: int, num_data: int) -> None:
    if width != num_data:
        raise DataError(
            f"a history of {num_data:,} examples",
            f"one of {width:,}",
            "resume with the data that the run was started with",
        )


@dataclass(frozen=True)
class _Read:
    """The state of a history, with its scores or with the place where they are."""

    records: tuple[Record, ...]
    width: int
    scores: Tensor | None = None
    folder: str = ""
    digest: str = ""
    loo_loss: Tensor | None = None
    loo_digest: str | None = None

    def loo_rows(self, scores: ScoreRows) -> ScoreRows:
        """Leave-one-out losses, kept where the scores are; NaN where an earlier state has none."""
        place = scores.folder if scores.kept else None
        if self.loo_digest is not None:
            rows = (len(self.records), self.width, self.loo_digest)
            return ScoreRows.reopen(place or "", *rows, LOO_FILE)
        known = self.loo_loss
        return ScoreRows.of_matrix(
            _nothing(scores.matrix()) if known is None else known, place, LOO_FILE
        )


def _read(state: Any) -> _Read:
    """StorageError for what is not the state of a history."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if type(found) is not int or found != FORMAT:  # a tensor would not say yes or no
        raise FormatError(
            f"a history in format {FORMAT}",
            f"format {found!r}",
            "read it with the version of engram that wrote it",
        )
    kinds = {"format": int, "records": tuple[Record, ...], "width": int}
    if "scores" in state:
        kinds |= {"scores": Tensor} | ({"loo_loss": Tensor} if "loo_loss" in state else {})
    else:
        kinds |= {"folder": str, "digest": str}
        kinds |= {"loo_digest": str} if "loo_digest" in state else {}
    values = objects(state, "a history", tuple(kinds))
    read = {name: typed(kind, values[name], name) for name, kind in kinds.items()}
    del read["format"]
    history = _Read(**read)
    if history.width < 0 or (history.records and history.width == 0):
        raise wrong("a history", "a number of examples", history.width)
    shape = (len(history.records), history.width if history.records else 0)
    for matrix in (history.scores, history.loo_loss):
        if matrix is not None and (tuple(matrix.shape), matrix.dtype) != (shape, torch.float32):
            raise wrong("a history", f"scores {list(shape)} in single precision", matrix)
    return history


KIND = stored(
    Kind(
        "history",
        FORMAT,
        lambda state, where: History.of_state(state),
        content=History.whole_state,
        check=lambda state, where: _read(state),  # making one would write its scores to a file
    )
)


class BoardWriter:
    """Writes every record to TensorBoard: losses as scalars, scores as a histogram.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``; it is neither flushed nor closed.
        prefix: in front of the names.
    """

    def __init__(self, writer: Any, prefix: str) -> None:
        if not (hasattr(writer, "add_scalar") and hasattr(writer, "add_histogram")):
            raise ArgumentError(
                "a torch.utils.tensorboard.SummaryWriter",
                type(writer).__name__,
                "pip install 'engram[tensorboard]' and pass SummaryWriter(folder)",
            )
        self.writer, self.prefix = writer, prefix

    def __call__(self, record: Record, scores: Tensor) -> None:
        for name, shown in LOSSES.items():
            value = getattr(record, name)
            if math.isfinite(value):
                self.writer.add_scalar(f"{self.prefix}/{shown}", value, record.step)
        known = scores[scores.isfinite()]
        if len(known):
            self.writer.add_histogram(f"{self.prefix}/score", known, record.step)
