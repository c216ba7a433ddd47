"""``engram doctor``: what is installed, what is supported, threads and devices."""

from __future__ import annotations

import typer

from engram.cli.output import Json, console, print_json


def command(as_json: Json = False) -> None:
    """Versions that are installed and supported, threads, memory and devices.

    Exit code 1 where a library that engram needs is missing or of another version.

    Example: engram doctor --json
    """
    from rich.table import Table

    from engram.core.installation import installation

    found = installation()
    if as_json:
        libraries = [{**vars(library), "fits": library.fits} for library in found.libraries]
        print_json({**found.machine, "libraries": libraries, "advice": found.advice})
    else:
        out = console()
        for name, value in found.machine.items():
            out.print(f"{name:10}{value}", markup=False)
        table = Table("library", "installed", "supported", "extra", "", box=None)
        for library in found.libraries:
            state = "ok" if library.installed and library.fits else "-" if library.fits else "WRONG"
            table.add_row(
                library.name, library.installed or "", library.supported, library.extra, state
            )
        out.print()
        out.print(table)
        for line in found.advice:
            out.print(line, markup=False)
    if not found.fits:
        raise typer.Exit(1)
