"""The ``engram`` command: its subcommands, and a saved result as a table in the terminal."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram._version import __version__
from engram.core.printable import printable
from engram.errors import EngramError
from engram.sensitivity.result import KIND

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(
    help="Which training examples a model depends on, and how it will do on unseen data.",
    no_args_is_help=True,
    add_completion=False,
)


class Ranking(str, Enum):
    """Columns that examples can be ranked by, highest first."""

    score = "score"
    loo_loss = "loo_loss"
    increase = "increase"
    loss = "loss"
    leverage = "leverage"


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
    from engram.demo.digits import Settings

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


def print_result(folder: Path, top: int, by: Ranking, console: Console) -> None:
    """Print the summary of the result in a folder, and the examples that rank highest."""
    result = KIND.read(folder)
    for line in str(result).split("\n"):
        console.print(Text(printable(line)), soft_wrap=True)
    console.print()
    frame = result.to_frame().sort_values(by.value, ascending=False, kind="stable").head(top)
    console.print(examples(frame, f"{len(frame)} examples with the highest {by.value}"))


def examples(frame: pd.DataFrame, title: str) -> Table:
    """One row per example, whole numbers as they are and others with four digits."""
    # Without the usual padding all columns fit into 80 characters.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for name in (frame.index.name, *frame.columns):
        # folded, not cut: a number without its end is another one, and not all have an ellipsis
        table.add_column(Text(printable(name)), justify="right", overflow="fold")
    for row in frame.itertuples():
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"  # NaN: not computed
    if isinstance(value, bool):
        return "yes" if value else ""
    return printable(value)
