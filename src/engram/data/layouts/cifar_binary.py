"""CIFAR-10's binary files: a label and 3 x 32 x 32 bytes for each image, plane after plane."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from engram.data.arrays import Arrays, Bytes
from engram.data.catalogue import Entry
from engram.data.layouts.places import places
from engram.errors import DataError

FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)


def find(folder: Path, entry: Entry) -> Path | None:
    if FOLDER.removesuffix("-batches-bin") not in (entry.name, *entry.aliases):
        return None
    for place in places(folder, entry):
        for found in (place / FOLDER, place):
            if all((found / name).is_file() for name in (*TRAIN, *TEST)):
                return found
        if (place / ARCHIVE).is_file():
            return place / ARCHIVE
    return None


def read(place: Path, entry: Entry) -> Arrays:
    contents = _members(place) if place.is_file() else {n: place / n for n in (*TRAIN, *TEST)}
    parts: list[Bytes] = []
    for names in (TRAIN, TEST):
        read = [contents[name] for name in names]
        parts += _images(b"".join(p.read_bytes() if isinstance(p, Path) else p for p in read))
    return Arrays(*parts)


def _members(archive: Path) -> dict[str, bytes]:
    """The files of the archive, by their names alone: no path in it is followed."""
    with tarfile.open(archive) as tar:
        found = {
            Path(member.name).name: opened.read()
            for member in tar
            if member.isfile() and (opened := tar.extractfile(member)) is not None
        }
    missing = {*TRAIN, *TEST} - set(found)
    if missing:
        raise DataError(f"{sorted(missing)[0]} in {archive}", "none", "fetch it again")
    return found


def planes_last(pixels: Bytes) -> Bytes:
    """[N, 3072] with one plane after the other as [N, 32, 32, 3]."""
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _images(content: bytes) -> tuple[Bytes, Bytes]:
    try:
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    except ValueError as error:
        raise DataError(
            "3,073 bytes for each image", f"{len(content):,} bytes", "fetch the files again"
        ) from error
    return planes_last(rows[:, 1:]), rows[:, 0].copy()
