"""Column names and row indices of pandas data frames, where a caller gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engram.errors import DataError

MENTIONED = 8  # names of columns in a message: enough to know the table by


def frame_names(inputs: Any) -> tuple[str, ...] | None:
    """The names of a data frame's columns; None for all else."""
    named = getattr(inputs, "columns", None)
    return None if named is None else tuple(str(name) for name in named)


def row_index(value: Any) -> Any:
    """The row index of a table or series of pandas; None for all else."""
    index = getattr(value, "index", None)
    return index if hasattr(index, "equals") else None


def column_names(inputs: Any, count: int) -> tuple[str, ...]:
    """The data frame's names, or x0, x1, ..."""
    named = frame_names(inputs)
    if named is not None and len(named) == count:
        return named
    return tuple(f"x{number}" for number in range(count))


def check_names(names: Sequence[str]) -> None:
    """DataError if two columns have one name: tables and messages could not tell them apart."""
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise DataError(
            "columns with a name each",
            f"{len(repeated)} repeated names (first: {', '.join(repeated[:MENTIONED])})",
            "rename or drop the repeated columns: X.loc[:, ~X.columns.duplicated()]",
        )


def check_rows(**values: Any) -> None:
    """DataError unless all that have a row index have the same one, in the same order.

    Rows are put together by position here, which is wrong for two tables that pandas would put
    together by their index.
    """
    found = {name: row_index(value) for name, value in values.items()}
    indexed = {name: index for name, index in found.items() if index is not None}
    first = next(iter(indexed), None)
    for name, index in indexed.items():
        if first is None or indexed[first].equals(index):
            continue
        same = sorted(map(str, index)) == sorted(map(str, indexed[first]))
        raise DataError(
            f"{first} and {name} with the same index, in the same order",
            "the same labels in another order" if same else "different ones",
            f"align them by label, {name} = {name}.loc[{first}.index]; or, if they belong together "
            "by position, call reset_index(drop=True) on both",
        )


def in_order(inputs: Any, names: Sequence[str]) -> Any:
    """A data frame with its columns in the order of the names; DataError if they are others."""
    found = frame_names(inputs)
    if found is None or found == tuple(names):
        return inputs
    if sorted(found) != sorted(names) or len(set(found)) < len(found):
        others = sorted(set(found) ^ set(names)) or ["repeated ones"]
        raise DataError(
            f"the columns that the model was fitted on, {', '.join(names[:MENTIONED])}",
            f"{', '.join(found[:MENTIONED])} (they differ in {', '.join(others[:MENTIONED])})",
            "pass a data frame with these columns, in any order",
        )
    return inputs.iloc[:, [found.index(name) for name in names]]
