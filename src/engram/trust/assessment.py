"""A verdict with the signals behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from torch import Tensor

from engram.errors import DataError
from engram.sensitivity.verdict import LEVELS, Reason, Verdict
from engram.trust.signals import Signals

FORMAT = 1


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

    def save(self, path: str | Path) -> Path:
        """Write a JSON file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        described = {
            "format": FORMAT,
            "verdict": self.verdict.to_dict(),
            "signals": self.signals.to_dict(),
        }
        path.write_text(json.dumps(described, indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Assessment:
        """Read what :meth:`save` wrote."""
        try:
            described = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                "a file written by assessment.save", f"{path}: {error}", "check the path"
            ) from error
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise DataError(
                f"an assessment in format {FORMAT}", f"another file, {path}", "check the path"
            )
        return cls(Verdict.from_dict(described["verdict"]), Signals.from_dict(described["signals"]))

    def __repr__(self) -> str:
        return f"{self.verdict!r}\n{self.signals}"
