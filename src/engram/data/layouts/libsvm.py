"""USPS in libsvm's text format, compressed: labels from 1 to 10, pixels from -1 to 1."""

from __future__ import annotations

import bz2
from pathlib import Path

import numpy as np

from engram.data.arrays import Arrays, Bytes
from engram.data.catalogue import Entry
from engram.data.layouts.places import places
from engram.errors import DataError

TRAIN, TEST = "usps.bz2", "usps.t.bz2"


def find(folder: Path, entry: Entry) -> Path | None:
    if not any(file.name == TRAIN for file in entry.files):
        return None
    for place in places(folder, entry):
        if (place / TRAIN).is_file() and (place / TEST).is_file():
            return place
    return None


def read(place: Path, entry: Entry) -> Arrays:
    return Arrays(*_images(place / TRAIN, entry), *_images(place / TEST, entry))


def _images(path: Path, entry: Entry) -> tuple[Bytes, Bytes]:
    size = int(np.prod(entry.shape))
    try:
        lines = bz2.decompress(path.read_bytes()).decode().splitlines()
        rows = [line.split() for line in lines]
        labels = np.array([int(row[0]) - 1 for row in rows], dtype=np.uint8)
        pixels = np.array([[float(cell.partition(":")[2]) for cell in row[1:]] for row in rows])
        pixels = ((pixels.reshape(-1, size) + 1) / 2 * 255).round().clip(0, 255)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"lines of a label and {size} pixels in {path}", str(error), "fetch it again"
        ) from error
    return pixels.astype(np.uint8).reshape(-1, *entry.shape), labels
