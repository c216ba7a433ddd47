"""``engram data list|get|where``: the data sets of the paper's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.output import Json, Quiet, console, print_json

app = typer.Typer(no_args_is_help=True, help="Data sets: list them, fetch one, say where it is.")
Name = Annotated[str, typer.Argument(help="As engram data list has them, such as mnist.")]
Names = Annotated[list[str], typer.Argument(help="As engram data list has them, such as mnist.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="ENGRAM_DATA",
        help="Folder of your data sets: npz, idx, torchvision's or Hugging Face's files.",
    ),
]


@app.command("list")
def list_command(folder: Folder = None, as_json: Json = False) -> None:
    """Which data sets there are, and which of them are here.

    Example: engram data list --data-dir ~/data
    """
    from rich.table import Column, Table

    from engram.data.catalogue import CATALOGUE
    from engram.data.loading import locate

    found = {name: locate(name, folder) for name in CATALOGUE}
    if as_json:
        print_json({name: place and str(place.path) for name, place in found.items()})
        return
    whole = Column("where", overflow="fold")  # a path with an ellipsis in it is no path
    table = Table("name", "data set", whole, box=None)
    for name, place in found.items():
        where = "not here" if place is None else f"{place.path} ({place.layout.name})"
        table.add_row(name, CATALOGUE[name].title, where)
    console().print(table)


@app.command("get")
def get_command(
    names: Names,
    folder: Folder = None,
    mirror: Annotated[
        str | None, typer.Option(help="An address with the files, asked before the public ones.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Find data sets, or fetch them, and check them; what is broken never counts.

    Example: engram data get mnist fmnist --data-dir ~/data
    """
    from engram.data.loading import load

    for name in names:
        images = load(name, folder, mirror=mirror, progress=not quiet)
        console().print(repr(images), markup=False, soft_wrap=True)


@app.command("where")
def where_command(name: Name, folder: Folder = None) -> None:
    """The file or folder that a data set is read from; exit code 1 where it is nowhere.

    Example: engram data where cifar10
    """
    from engram.data.catalogue import Part, known
    from engram.data.fetching import where_to_put
    from engram.data.loading import locate, searched

    place = locate(name, folder)
    if place is not None:
        console().print(str(place.path), markup=False, soft_wrap=True)
        return
    found = known(name)
    entry = found.whole if isinstance(found, Part) else found
    looked = "\n".join(f"  {path}" for path in searched(entry, folder))
    typer.echo(f"engram: {found.title} is in none of\n{looked}", err=True)
    typer.echo(f"Fetch it: engram data get {name}; or {where_to_put(entry)}", err=True)
    raise typer.Exit(1)
