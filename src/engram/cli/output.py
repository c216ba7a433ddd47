"""What commands print: tables and words for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram.core.printable import printable

if TYPE_CHECKING:
    import pandas as pd

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only what counts.")]


def console() -> Console:
    """Standard output; colours only in a terminal, and never with NO_COLOR."""
    return Console(highlight=False)


def say(text: object, to: Console) -> None:
    """Print lines as they are: nothing in them is markup, and control characters are escaped."""
    for line in str(text).split("\n"):
        to.print(Text(printable(line)), soft_wrap=True)


def print_json(value: Any) -> None:
    """A value as JSON; what is no number is null."""
    typer.echo(json.dumps(plain(value), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """Numbers, texts, lists and objects, as JSON has them.

    Example:
        >>> import numpy as np
        >>> plain({"a": np.float64(2), "b": (1, float("nan"))})
        {'a': 2.0, 'b': [1, None]}
    """
    if hasattr(value, "to_dict") and hasattr(value, "reset_index"):  # a table
        return plain(value.reset_index().to_dict("records"))
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):  # of numpy or torch
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def frame_table(frame: pd.DataFrame, title: str | None = None) -> Table:
    """One row per row, whole numbers as they are and others with four digits."""
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
