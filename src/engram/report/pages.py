"""The page of a training, as the tracker asks for it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from engram.report.html import write_page
from engram.report.training_page import training_data
from engram.tracking.held_out import HeldOut
from engram.tracking.history import History


def training_page(
    history: History, details: pd.DataFrame | None, held_out: HeldOut | None, count: int, path: Path
) -> Path:
    """Write the page of a training run.

    Args:
        history: with at least one update.
        details: one row per example of the last update.
        held_out: examples left out of a twin; None if the estimate is the posterior's.
        count: rows of the table of examples.
        path: of the file.
    """
    return write_page(training_data(history, details, held_out), path, count)
