"""The four idx files of MNIST and Fashion-MNIST, plain or compressed; torchvision keeps them so."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np

from engram.data.arrays import Arrays, Bytes
from engram.data.catalogue import Entry
from engram.data.layouts.places import file_in, places
from engram.errors import DataError

FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
UNSIGNED_BYTES = 8  # the code of the entries' type in an idx file


def find(folder: Path, entry: Entry) -> Path | None:
    for place in places(folder, entry):
        if all(_file(place, name) for name in FILES) and (place != folder or _is(place, entry)):
            return place
    return None


def read(place: Path, entry: Entry) -> Arrays:
    paths = (_file(place, name) for name in FILES)
    return Arrays(*(read_file(path) for path in paths if path is not None))


def _file(place: Path, name: str) -> Path | None:
    return file_in(place, FILES[name], f"{FILES[name]}.gz")


def _is(place: Path, entry: Entry) -> bool:
    """Whether the training labels are the entry's: two data sets have these files in one form."""
    path = _file(place, "y_train")
    try:
        labels = None if path is None else read_file(path)
    except (DataError, OSError, EOFError):
        return True  # damaged: to be told so, not passed over
    return labels is not None and hashlib.sha256(labels.data).hexdigest() == entry.digests.get(
        "y_train"
    )


def read_file(path: Path) -> Bytes:
    """An idx file of unsigned bytes: two zeros, their type, the number of axes, their lengths."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    if len(content) < 4 or content[:3] != bytes([0, 0, UNSIGNED_BYTES]):
        raise DataError(
            f"an idx file of unsigned bytes at {path}", f"{content[:4]!r}", "fetch it again"
        )
    axes = content[3]
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", content[4:start].ljust(4 * axes, b"\0"))
    if len(content) - start != int(np.prod(shape)):
        raise DataError(
            f"{int(np.prod(shape)):,} entries in {path}",
            f"{max(0, len(content) - start):,}",
            "fetch it again: the file is cut off",
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
