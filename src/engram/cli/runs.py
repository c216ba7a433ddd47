"""The folder of a run, as commands take it: of an audit, or of a result alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.auditing.outcome import Audit
from engram.auditing.run_folder import KIND as AUDIT
from engram.cli.commands import RUN_FILE
from engram.sensitivity.result import KIND, Result

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of an audit, of result.save or of the demo.")
]


def saved_in(run: Path) -> Audit | Result:
    """The audit or the result in a run's folder; StorageError where there is none."""
    return AUDIT.read(run) if (run / RUN_FILE).is_file() else KIND.read(run)


def result_in(run: Path) -> Result:
    """The result in a run's folder; StorageError where there is none."""
    found = saved_in(run)
    return found.result if isinstance(found, Audit) else found
