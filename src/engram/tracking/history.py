"""What was seen at each update: losses over time, and every example's sensitivity over time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engram.arguments import whole
from engram.errors import ArgumentError, DataError
from engram.sensitivity.result import Result
from engram.tracking.scores import ScoreRows

FORMAT = 2
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the leverages that a record keeps


@dataclass(frozen=True)
class Record:
    """One update. Losses are means in nats per example; NaN where they were not finite or given.

    ``leverage`` has the quantiles 5, 25, 50, 75 and 95 % of the leverages where they were
    computed; ``streamed`` says whether the examples were seen one step after the other.
    """

    step: int
    train: float
    estimate: float
    validation: float = math.nan
    leverage: tuple[float, ...] = ()
    streamed: bool = False

    @classmethod
    def of_result(cls, step: int, result: Result, validation: float) -> Record:
        """What an update keeps of its result."""
        known = result.leverage[~result.leverage.isnan()].double()
        quantiles = known.quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
        return cls(step, result.train_nll, result.loo_nll, validation, tuple(quantiles))

    @property
    def finite(self) -> bool:
        """Whether the update could be made."""
        return math.isfinite(self.estimate)

    def to_plain(self) -> dict[str, Any]:
        """Numbers, truth values and lists by name, with None for what is not finite."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def of_plain(cls, row: Mapping[str, Any]) -> Record:
        """What :meth:`to_plain` gave."""
        given: dict[str, Any] = {
            f.name: math.nan if row[f.name] is None else row[f.name]
            for f in fields(cls)
            if f.name in row
        }
        return cls(**given | {"leverage": tuple(given.get("leverage", ()))})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value


class History:
    """Records in the order of the updates, with the scores [N] of each.

    Args:
        folder: where the scores are written as they come; see :class:`ScoreRows`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.records: list[Record] = []
        self.scores = ScoreRows(folder)

    def add(self, record: Record, scores: Tensor) -> None:
        """Append an update; the scores of one that could not be made are NaN."""
        self.scores.append(scores)
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
        """How many updates came after the best one."""
        best = self.best
        return len(self.records) if best is None else len(self.records) - 1 - self._index(best)

    def _index(self, record: Record) -> int:
        return next(i for i, r in enumerate(self.records) if r is record)

    def to_frame(self) -> pd.DataFrame:
        """One row per update, indexed by step."""
        columns = ["step", "train", "estimate", "validation", "streamed"]
        rows = [[getattr(record, name) for name in columns] for record in self.records]
        return pd.DataFrame(rows, columns=columns).set_index("step")

    def score_matrix(self) -> Tensor:
        """Scores over time, [updates, N]."""
        return self.scores.matrix()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors. Scores in a folder of the user's are named, not copied."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "records": [record.to_plain() for record in self.records],
            "width": self.scores.width,
        }
        if self.scores.kept:
            return state | {"folder": str(self.scores.folder)}
        return state | {"scores": self.score_matrix().clone()}

    @classmethod
    def of_state(
        cls,
        state: Mapping[str, Any],
        folder: str | Path | None = None,
        num_data: int | None = None,
    ) -> History:
        """What :meth:`state_dict` gave; ``folder`` is where the run keeps its scores now.

        DataError where they are scores of other than ``num_data`` examples.
        """
        _check_format(state)
        if num_data is not None and state["records"]:
            _check_width(state["width"], num_data)
        history = cls()
        history.records = [Record.of_plain(row) for row in state["records"]]
        place = state.get("folder") if folder is None else folder
        if "scores" not in state:
            history.scores = ScoreRows.reopen(place or "", len(history), state["width"])
            return history
        history.scores = ScoreRows(place)
        history.scores.take_over()
        for row in state["scores"]:
            history.scores.append(row)
        return history

    def save(self, folder: str | Path) -> Path:
        """Write ``history.json`` and ``scores.safetensors``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file({"scores": self.score_matrix().contiguous()}, path / "scores.safetensors")
        rows = [record.to_plain() for record in self.records]
        text = json.dumps({"format": FORMAT, "records": rows}, indent=2)
        (path / "history.json").write_text(text + "\n")
        return path

    @classmethod
    def load(
        cls, folder: str | Path, keep: str | Path | None = None, num_data: int | None = None
    ) -> History:
        """Read what :meth:`save` wrote; ``keep`` is where the run keeps its scores from now on."""
        path = Path(folder)
        if not (path / "history.json").is_file():
            raise DataError("a folder with history.json", str(path), "check the path")
        description = json.loads((path / "history.json").read_text())
        _check_format(description)
        scores = load_file(path / "scores.safetensors")["scores"]
        state = description | {"scores": scores, "width": scores.shape[1]}
        return cls.of_state(state, keep, num_data)


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


def _check_format(description: Mapping[str, Any]) -> None:
    if description.get("format") != FORMAT:
        raise DataError(
            f"a history in format {FORMAT}",
            f"format {description.get('format')!r}",
            "read it with the version of engram that wrote it",
        )
