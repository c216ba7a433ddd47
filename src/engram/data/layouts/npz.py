"""One ``NAME.npz`` with the four arrays, as engram writes it and keras keeps it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np

from engram.data.arrays import NAMES, Arrays
from engram.data.layouts.places import file_in


class Named(Protocol):
    """What has a name and other names."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


def find(folder: Path, entry: Named) -> Path | None:
    return file_in(folder, *(f"{name}.npz" for name in (entry.name, *entry.aliases)))


def read(place: Path, entry: Named) -> Arrays:
    with np.load(place, allow_pickle=False) as stored:
        return Arrays(*(np.asarray(stored[name], dtype=np.uint8) for name in NAMES))


def write(arrays: Arrays, folder: Path, name: str) -> Path:
    """Write the arrays, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.npz"
    handle, part = tempfile.mkstemp(suffix=".npz.part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez_compressed(stream, **{key: getattr(arrays, key) for key in NAMES})
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    return target
