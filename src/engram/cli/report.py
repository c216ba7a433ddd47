"""``engram report RUN``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.output import console
from engram.cli.runs import Run, saved_in

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The file; RUN/report.html if not given.")
]


def command(run: Run, output: Output = None) -> None:
    """Write the page of a run: one file that opens without a network.

    Example: engram report run -o page.html
    """
    written = saved_in(run).report(output or run / "report.html")
    console().print(str(written), markup=False, soft_wrap=True)
