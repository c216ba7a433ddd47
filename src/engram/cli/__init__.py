"""The ``engram`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engram._version import __version__
from engram.cli.listing import Ranking, print_result
from engram.core.errors import EngramError
from engram.core.printable import printable

app = typer.Typer(
    help="Which training examples a model depends on, and how it will do on unseen data.",
    no_args_is_help=True,
    add_completion=False,
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


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the result.")] = Path(
        "run/demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the split, flips and weights.")] = 0,
) -> None:
    """Train on digits with some wrong labels, and find them; no network, under a minute."""
    # Imported here: the other commands should not wait for matplotlib and scikit-learn.
    from engram.cli.demo import run
    from engram.demo.settings import Settings

    run(Settings(seed=seed), out, Console())


@app.command("show")
def show_command(
    folder: Annotated[Path, typer.Argument(help="Written by result.save or by the demo.")],
    top: Annotated[int, typer.Option(min=1, help="How many examples to list.")] = 20,
    by: Annotated[Ranking, typer.Option(help="What to rank them by.")] = Ranking.score,
) -> None:
    """Print a saved result: its summary and its most sensitive examples."""
    try:
        print_result(folder, top, by, Console())
    except EngramError as error:
        typer.echo(f"engram: {printable(error)}", err=True)
        raise typer.Exit(1) from None
