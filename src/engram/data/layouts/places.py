"""Folders below a folder of data sets in which one of them may be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engram.data.catalogue import Entry


def places(folder: Path, entry: Entry) -> Iterator[Path]:
    """Those that the entry names, then the folder itself."""
    for name in entry.folders:
        if (folder / name).is_dir():
            yield folder / name
    yield folder


def file_in(folder: Path, *names: str) -> Path | None:
    """The first of some files that is there."""
    return next((folder / name for name in names if (folder / name).is_file()), None)
