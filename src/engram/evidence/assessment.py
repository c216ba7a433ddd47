"""A verdict with the signals behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from torch import Tensor

from engram.core.storage.kinds import Kind, check_that, checked, stored
from engram.core.storage.values import ADDED_LATER
from engram.evidence.signals import Signals
from engram.trust.verdict import LEVELS, Reason, Verdict

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Assessment:
    """How far to believe a result, from everything that can be known without retraining.

    Attributes:
        verdict: the result's own, refined by the signals.
        signals: what was measured, over the sample and for each of its examples.
        notes: what it cannot tell, in words.
    """

    verdict: Verdict
    signals: Signals
    notes: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)

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
        import pandas as pd

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
        return KIND.write(self, folder)

    def __repr__(self) -> str:
        notes = "".join("\n" + fill(note, 79) for note in self.notes)
        return f"{self.verdict!r}\n{self.signals}{notes}"


def _check(found: Assessment) -> None:
    rows, last = len(found.levels), int(found.signals.positions.max())
    check_that(last < rows, f"positions among {rows} examples", f"{last}")


KIND = stored(Kind("assessment", 2, checked(Assessment, {}, _check)))
