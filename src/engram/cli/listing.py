"""A saved result in the terminal."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram.core.printable import printable
from engram.sensitivity.result import KIND


class Ranking(str, Enum):
    """Columns that examples can be ranked by, highest first."""

    score = "score"
    loo_loss = "loo_loss"
    increase = "increase"
    loss = "loss"
    leverage = "leverage"


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
