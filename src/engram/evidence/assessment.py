"""A verdict with the signals behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from engram.core.storage.folder import read_folder, write_folder
from engram.core.storage.values import as_read, read_fields
from engram.evidence.saved import FORMAT, check_saved
from engram.evidence.signals import Signals
from engram.trust.verdict import LEVELS, Reason, Verdict


@dataclass(frozen=True, eq=False)
class Assessment:
    """How far to believe a result, from everything that can be known without retraining.

    Attributes:
        verdict: the result's own, refined by the signals.
        signals: what was measured, over the sample and for each of its examples.
    """

    verdict: Verdict
    signals: Signals

    @property
    def level(self) -> str:
        """``good``, ``caution`` or ``unreliable``."""
        return self.verdict.level

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """What speaks against the result, each with a remedy; the worst first."""
        return self.verdict.reasons

    @property
    def levels(self) -> Tensor:
        """Of every example, as a position in good, caution, unreliable, [N]."""
        return self.verdict.levels

    def to_frame(self) -> pd.DataFrame:
        """One row per example of the sample, by its position in the data."""
        signals = self.signals
        columns = {
            "score": signals.score.numpy(),
            "second_score": signals.second_score.numpy(),
            "linearisation_error": signals.linearisation_error.numpy(),
            "residual": signals.residuals.numpy(),
            "level": [LEVELS[int(self.levels[p])] for p in signals.positions],
        }
        return pd.DataFrame(columns, index=pd.Index(signals.indices.numpy(), name="example"))

    def save(self, folder: str | Path) -> Path:
        """Write ``assessment.json`` and its tensors into a folder, whole; no pickle."""
        _read(as_read(self))
        return write_folder(folder, "assessment", FORMAT, self)

    @classmethod
    def load(cls, folder: str | Path) -> Assessment:
        """Read what :meth:`save` wrote; StorageError where it is damaged or not finite."""
        return _read(read_folder(folder, "assessment", FORMAT))

    def __repr__(self) -> str:
        return f"{self.verdict!r}\n{self.signals}"


def _read(content: Any) -> Assessment:
    found = Assessment(**read_fields(Assessment, content, "assessment.json"))
    check_saved(found.verdict, found.signals)
    return found
