"""What was seen at each update: losses over time, and every example's sensitivity over time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engram.errors import DataError

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One update. Losses are means in nats per example; NaN where they were not finite or given."""

    step: int
    train: float
    estimate: float
    validation: float = math.nan

    @property
    def finite(self) -> bool:
        """Whether the update could be made."""
        return math.isfinite(self.estimate)


@dataclass
class History:
    """Records in the order of the updates, with the scores [N] of each."""

    records: list[Record] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def add(self, record: Record, scores: Tensor) -> None:
        """Append an update; the scores of one that could not be made are NaN."""
        self.records.append(record)
        self.scores.append(scores.to(torch.float32))

    def __len__(self) -> int:
        return len(self.records)

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
        columns = ["step", "train", "estimate", "validation"]
        frame = pd.DataFrame([asdict(record) for record in self.records], columns=columns)
        return frame.set_index("step")

    def score_matrix(self) -> Tensor:
        """Scores over time, [updates, N]."""
        return torch.stack(self.scores) if self.scores else torch.empty(0, 0)

    def save(self, folder: str | Path) -> Path:
        """Write ``history.json`` and ``scores.safetensors``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file({"scores": self.score_matrix().contiguous()}, path / "scores.safetensors")
        rows = [
            {k: (v if not isinstance(v, float) or math.isfinite(v) else None) for k, v in r.items()}
            for r in map(asdict, self.records)
        ]
        text = json.dumps({"format": FORMAT, "records": rows}, indent=2)
        (path / "history.json").write_text(text + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> History:
        """Read what :meth:`save` wrote."""
        path = Path(folder)
        if not (path / "history.json").is_file():
            raise DataError("a folder with history.json", str(path), "check the path")
        description = json.loads((path / "history.json").read_text())
        if description.get("format") != FORMAT:
            raise DataError(
                f"a history in format {FORMAT}",
                f"format {description.get('format')!r}",
                "read it with the version of engram that wrote it",
            )
        losses = ("train", "estimate", "validation")
        records = [
            Record(row["step"], *(math.nan if row[k] is None else row[k] for k in losses))
            for row in description["records"]
        ]
        matrix = load_file(path / "scores.safetensors")["scores"]
        return cls(records, list(matrix.unbind(0)) if len(records) else [])
