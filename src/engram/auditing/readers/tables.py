"""Tables: CSV and TSV, Parquet, and JSON lines."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engram.auditing.columns import Wanted, from_frame
from engram.auditing.examples import Examples
from engram.core.memory import available_bytes
from engram.core.optional import require
from engram.core.printable import printable
from engram.errors import DataError, brief

if TYPE_CHECKING:
    import pandas as pd

LARGEST_FILE = 2 * 2**30  # bytes of a table that is read whole
MEMORY_SHARE = 0.15  # of the free memory that the file may have: in memory it is some times larger
CHUNK = 50_000  # rows that are read at once where a sample is drawn
FIRST_LINE = 1 << 20  # bytes in which the header must end


def read_csv(path: Path, wanted: Wanted) -> Examples:
    """A file with a header and values divided by commas (or what the header is divided by)."""
    return _delimited(path, wanted, None)


def read_tsv(path: Path, wanted: Wanted) -> Examples:
    """The same, divided by tabs."""
    return _delimited(path, wanted, "\t")


def _delimited(path: Path, wanted: Wanted, divider: str | None) -> Examples:
    import pandas as pd

    if wanted.sample is None:
        check_size(path, path.stat().st_size)
    divider = _check_header(path, divider)

    def parsed() -> pd.DataFrame:
        if wanted.sample is None:
            return pd.read_csv(path, sep=divider, low_memory=False)
        chunks = pd.read_csv(path, sep=divider, low_memory=False, chunksize=CHUNK)
        return _sampled(chunks, wanted.sample, wanted.seed)

    return from_frame(_read(path, parsed), wanted, path.name, path.parent)


def read_parquet(path: Path, wanted: Wanted) -> Examples:
    """A Parquet file."""
    pq = require("pyarrow.parquet", "audit")

    def parsed() -> pd.DataFrame:
        if wanted.sample is None:
            check_size(path, path.stat().st_size)
            return pq.read_table(path).to_pandas()
        with pq.ParquetFile(path) as file:
            chunks = (batch.to_pandas() for batch in file.iter_batches(CHUNK))
            return _sampled(chunks, wanted.sample, wanted.seed)

    return from_frame(_read(path, parsed), wanted, path.name, path.parent)


def read_json_lines(path: Path, wanted: Wanted) -> Examples:
    """A file with a JSON object on every line."""
    import pandas as pd

    def parsed() -> pd.DataFrame:
        if wanted.sample is None:
            check_size(path, path.stat().st_size)
            return pd.read_json(path, lines=True, dtype=False)
        chunks = pd.read_json(path, lines=True, dtype=False, chunksize=CHUNK)
        return _sampled(chunks, wanted.sample, wanted.seed)

    return from_frame(_read(path, parsed), wanted, path.name, path.parent)


def _read(path: Path, parsed: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    try:
        return parsed()
    except DataError:
        raise
    except (OSError, ValueError, ArithmeticError, MemoryError, KeyError) as error:
        raise DataError(f"a table in {path}", brief(error), "mend the file") from error


def check_size(path: Path, size: int) -> None:
    """DataError where files of so many bytes are too large to be read whole."""
    limit = min(LARGEST_FILE, int(MEMORY_SHARE * available_bytes(torch.device("cpu"))))
    if size > limit:
        raise DataError(
            f"a table of at most {limit / 2**30:.1f} GB, which memory has room for",
            f"{path.name} with {size / 2**30:.1f} GB",
            "audit a random part: sample=100_000",
        )


def _sampled(chunks: Iterable[pd.DataFrame], count: int, seed: int) -> pd.DataFrame:
    """A uniform draw of rows: those with the smallest of as many random numbers."""
    import pandas as pd

    generator = np.random.default_rng(seed)
    kept, keys = pd.DataFrame(), np.empty(0)
    seen = 0
    for chunk in chunks:
        chunk = chunk.set_axis(range(seen, seen + len(chunk)))  # known by its row in the file
        seen += len(chunk)
        both = pd.concat([kept, chunk])
        keys = np.concatenate([keys, generator.random(len(chunk))])
        chosen = np.sort(np.argsort(keys, kind="stable")[:count])
        kept, keys = both.iloc[chosen], keys[chosen]
    return kept


def _check_header(path: Path, divider: str | None) -> str:
    """What divides the columns; DataError where two have one name, which pandas would rename."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            line = file.readline(FIRST_LINE)
    except OSError as error:
        raise DataError("a file that can be read", brief(error), "check the path") from error
    if divider is None:
        divider = max(",;\t|", key=line.count)
    try:
        names = next(csv.reader([line], delimiter=divider), [])
    except csv.Error as error:
        raise DataError(
            f"a line of column names in {path.name}",
            f"{len(line):,} characters: {brief(error)}",
            "check that it is a table, divided by commas or tabs",
        ) from error
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            "column names that differ",
            f"{printable(twice[0])!r} more than once in {path.name}",
            "rename one of them",
        )
    return divider
