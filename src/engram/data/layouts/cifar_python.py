"""CIFAR-10's Python batches, as torchvision keeps them, read without unpickling.

A pickle is a program, and nothing of it runs here: :mod:`pickletools` lists its instructions, the
one string of the pictures' length is the pictures, and the small numbers after the word ``labels``
are the labels. The checksum of the arrays says whether that was right.
"""

from __future__ import annotations

import pickletools
from pathlib import Path

import numpy as np

from engram.data.arrays import Arrays, Bytes
from engram.data.catalogue import Entry
from engram.data.layouts.cifar_binary import planes_last
from engram.data.layouts.places import places
from engram.errors import DataError

FOLDER = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
SMALL_NUMBERS = ("BININT1", "BININT", "BININT2", "INT")
PIXELS = 3 * 32 * 32


def find(folder: Path, entry: Entry) -> Path | None:
    if FOLDER.removesuffix("-batches-py") not in (entry.name, *entry.aliases):
        return None
    for place in places(folder, entry):
        for found in (place / FOLDER, place):
            if all((found / name).is_file() for name in (*TRAIN, *TEST)):
                return found
    return None


def read(place: Path, entry: Entry) -> Arrays:
    parts: list[Bytes] = []
    for names in (TRAIN, TEST):
        batches = [read_batch((place / name).read_bytes(), name) for name in names]
        parts += [np.concatenate(column) for column in zip(*batches, strict=True)]
    return Arrays(*parts)


def read_batch(content: bytes, name: str) -> tuple[Bytes, Bytes]:
    """Images [n, 32, 32, 3] and labels [n] of one file."""
    pixels, labels, in_labels = b"", bytearray(), False
    try:
        for instruction, argument, _ in pickletools.genops(content):
            if isinstance(argument, str | bytes):
                text = argument.encode("latin1") if isinstance(argument, str) else argument
                pixels = text if len(text) > len(pixels) else pixels
                in_labels = text == b"labels"
            elif in_labels and instruction.name in SMALL_NUMBERS:
                labels.append(int(argument or 0))
    except (ValueError, OverflowError, IndexError) as error:
        raise DataError(f"a batch of CIFAR-10 in {name}", str(error), "fetch it again") from error
    if len(pixels) != PIXELS * len(labels) or not labels:
        raise DataError(
            f"{PIXELS:,} bytes for each of the {len(labels):,} labels in {name}",
            f"{len(pixels):,} bytes",
            "fetch it again",
        )
    return planes_last(np.frombuffer(pixels, np.uint8)), np.frombuffer(bytes(labels), np.uint8)
