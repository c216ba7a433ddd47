"""``engram compare RUN RUN``: which of some models will do better on unseen data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.output import Json, Quiet, console, frame_table, print_json, say
from engram.cli.runs import result_in

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of results on the same data.")
]


def command(runs: Runs, as_json: Json = False, quiet: Quiet = False) -> None:
    """Compare models by their leave-one-out losses, with the chance that one is worse.

    Example: engram compare run/small run/large
    """
    from engram.sensitivity.comparison import compare

    if len(set(runs)) < 2:
        raise typer.BadParameter("give the folders of two runs or more", param_hint="RUN")
    found = compare({_name(run, runs): result_in(run) for run in runs})
    if as_json:
        print_json({"best": found.best, "notes": found.notes, "models": found.to_frame()})
    elif quiet:
        console().print(found.best, markup=False)
    else:
        out = console()
        say(found, out)
        metrics = found.to_frame().drop(columns=["difference", "standard_error", "chance_worse"])
        out.print(frame_table(metrics.T.rename_axis("leave-one-out")))


def _name(run: Path, runs: list[Path]) -> str:
    """The folder's own name where it tells the runs apart."""
    names = [other.resolve().name for other in runs]
    return run.resolve().name if len(set(names)) == len(names) else str(run)
