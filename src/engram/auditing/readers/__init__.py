"""Readers: one a kind of file, each giving the same :class:`~engram.auditing.examples.Examples`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engram.auditing.columns import Wanted, checked, from_frame
from engram.auditing.examples import Examples
from engram.auditing.readers.arrays import from_arrays, read_arrays
from engram.auditing.readers.dataset_folder import is_dataset_folder, read_dataset_folder
from engram.auditing.readers.pictures import read_picture_folder
from engram.auditing.readers.tables import read_csv, read_json_lines, read_parquet, read_tsv
from engram.auditing.readers.text_lines import read_text_lines
from engram.core.arguments import shown
from engram.errors import ArgumentError, DataError

Reader = Callable[[Path, Wanted], Examples]
READERS: dict[str, Reader] = {  # by the ending of a file's name
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".tab": read_tsv,
    ".parquet": read_parquet,
    ".pq": read_parquet,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".npz": read_arrays,
    ".txt": read_text_lines,
    ".label": read_text_lines,
    ".labels": read_text_lines,
    "": read_text_lines,
}


def read_examples(data: Any, wanted: Wanted) -> Examples:
    """The examples of a file, a folder, a table in memory, or a pair of arrays.

    Args:
        data: the path of a file or folder, a ``DataFrame``, or (inputs, labels).
        wanted: what its columns are for.

    Example:
        >>> import numpy as np
        >>> read_examples((np.eye(3), ["a", "b", "a"]), Wanted())
        Examples(3 of kind tabular, binary)
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, str | Path):
        return checked(_of_path(Path(data), wanted))
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        return from_frame(data, wanted, "the table", None)
    if isinstance(data, tuple) and len(data) == 2:
        return from_arrays(*data, wanted, "the arrays")
    raise ArgumentError(
        "a path, a DataFrame, or a tuple of inputs and labels",
        shown(data),
        'pass the path of the data: engram.audit("data.csv")',
    )


def _of_path(path: Path, wanted: Wanted) -> Examples:
    if not path.exists():
        raise DataError(
            "a file or folder with data", f"{path}, which is not there", "check the path"
        )
    if path.is_dir():
        return (read_dataset_folder if is_dataset_folder(path) else read_picture_folder)(
            path, wanted
        )
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"a file ending in {', '.join(filter(None, READERS))}, or a folder",
            str(path),
            "rename it by what is in it, or convert it to CSV or Parquet",
        )
    return reader(path, wanted)
