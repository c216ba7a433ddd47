"""The ``engram`` command: one file for each of its commands, all of them thin."""

from __future__ import annotations

from typing import Annotated

import typer

from engram._version import __version__
from engram.cli import (
    again,
    audit,
    certify,
    check,
    compare,
    data,
    demo,
    doctor,
    plan,
    refine,
    report,
    score,
    show,
    verify,
)
from engram.cli.commands import Commands

app = typer.Typer(
    cls=Commands,
    help="Which training examples a model depends on, and how it will do on unseen data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # errors are told by the group of commands
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"engram {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The command without a subcommand."""


app.command("audit")(audit.command)
app.command("show")(show.command)
app.command("report")(report.command)
app.command("check")(check.command)
app.command("compare")(compare.command)
app.command("verify")(verify.command)
app.command("certify")(certify.command)
app.command("refine")(refine.command)
app.command("score")(score.command)
app.command("plan")(plan.command)
app.command("again")(again.command)
app.add_typer(data.app, name="data")
app.command("demo")(demo.command)
app.command("doctor")(doctor.command)
