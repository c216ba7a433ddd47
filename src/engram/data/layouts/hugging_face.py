"""Parquet files of a dataset on the Hub, or the Arrow files of ``save_to_disk``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engram.core.optional import require
from engram.data.arrays import Arrays, Bytes
from engram.data.catalogue import Entry
from engram.data.layouts.places import places
from engram.errors import DataError

IMAGES, LABELS = ("image", "img"), ("label", "labels")  # names of the columns, as they are in use


def find(folder: Path, entry: Entry) -> Path | None:
    names = (entry.name, *entry.aliases, *entry.folders)
    for place in places(folder, entry):
        if place == folder and folder.name not in names:
            continue  # the folder of many data sets is none of them
        for root in (place, *sorted(place.glob("snapshots/*"))):
            for found in (root, *sorted(path for path in root.glob("*") if path.is_dir())):
                if _files(found, "train") and _files(found, "test"):
                    return found
    return None


def _files(folder: Path, part: str) -> list[Path]:
    patterns = (f"{part}-*.parquet", f"{part}.parquet", f"{part}/*.parquet", f"{part}/*.arrow")
    return next((found for found in (sorted(folder.glob(p)) for p in patterns) if found), [])


def read(place: Path, entry: Entry) -> Arrays:
    parts = (_images(_files(place, part), place, entry) for part in ("train", "test"))
    return Arrays(*(array for part in parts for array in part))


def _images(paths: list[Path], place: Path, entry: Entry) -> tuple[Bytes, Bytes]:
    images: list[Bytes] = []
    labels: list[int] = []
    for path in paths:
        table = _table(path)
        images += [_pixels(cell, path, entry) for cell in _column(table, IMAGES, path).to_pylist()]
        labels += _column(table, LABELS, path).to_pylist()
    return np.stack(images), np.array(labels, dtype=np.uint8)


def _table(path: Path) -> Any:
    if path.suffix == ".parquet":
        return require("pyarrow.parquet", "data").read_table(path)
    arrow = require("pyarrow", "data")
    with arrow.memory_map(str(path)) as source:
        return arrow.ipc.open_stream(source).read_all()


def _column(table: Any, names: tuple[str, ...], path: Path) -> Any:
    for name in names:
        if name in table.column_names:
            return table[name]
    raise DataError(
        f"a column {' or '.join(names)} in {path}",
        ", ".join(table.column_names),
        "rename the column",
    )


def _pixels(cell: dict[str, Any], path: Path, entry: Entry) -> Bytes:
    try:
        image = Image.open(io.BytesIO(cell["bytes"]))
        found = np.asarray(image.convert("RGB" if len(entry.shape) == 3 else "L"))
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"pictures in the file {path}", f"{type(error).__name__}: {error}", "fetch it again"
        ) from error
    return found
