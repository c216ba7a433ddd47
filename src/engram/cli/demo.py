"""``engram demo``: train on digits with some wrong labels, and find them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.output import console

Out = Annotated[Path, typer.Option(help="Folder for the picture and the result.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the split, flips and weights.")]


def command(out: Out = Path("run/demo"), seed: Seed = 0) -> None:
    """Train on digits with some wrong labels, and find them; no network, under a minute.

    Example: engram demo --out run/demo
    """
    # Imported here: the other commands should not wait for matplotlib and scikit-learn.
    from engram.cli.demonstration import run
    from engram.demo.digits import Settings

    run(Settings(seed=seed), out, console())
