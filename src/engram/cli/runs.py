"""The folder of a run, as commands take it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.sensitivity.result import KIND, Result

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of an audit, of result.save or of the demo.")
]


def result_in(run: Path) -> Result:
    """The result in a run's folder; StorageError where there is none."""
    return KIND.read(run)
