"""``engram RUN/run.json``: make a run again, with its settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from engram.cli.audit import run_audit
from engram.cli.output import Json, Quiet, console

File = Annotated[Path, typer.Argument(metavar="RUN/run.json", help="The file of an audit's run.")]
Output = Annotated[
    Path | None, typer.Argument(metavar="[OUTPUT]", help="Folder; RUN-again if not given.")
]
COMPARED = ("engram", "python", "torch", "numpy", "pandas", "scikit-learn", "git")  # of the facts


def command(file: File, output: Output = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Make a run again with the settings in its file, and say what is different now.

    Example: engram run/reviews/run.json
    """
    from engram.auditing.provenance import provenance
    from engram.auditing.run_folder import KIND

    before = KIND.read(file.parent)
    folder = file.resolve().parent
    if not (quiet or as_json):
        for line in differences(before.facts, provenance()):
            console().print(line, markup=False, soft_wrap=True)
    run_audit(
        dict(before.settings), output or folder.with_name(f"{folder.name}-again"), as_json, quiet
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Versions and the commit, where they are others than in the run.

    Example:
        >>> differences({"torch": "2.4", "git": "a"}, {"torch": "2.5", "git": "a"})
        ['torch was 2.4 and is 2.5']
    """
    return [
        f"{name} was {before.get(name) or 'unknown'} and is {now.get(name) or 'unknown'}"
        for name in COMPARED
        if before.get(name) != now.get(name)
    ]
