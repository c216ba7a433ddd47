"""Whether arrays are the data set they are said to be."""

from __future__ import annotations

import numpy as np

from engram.data.arrays import Arrays, Bytes
from engram.data.catalogue import Entry, Part
from engram.errors import DataError


def fetch_again(entry: Entry | Part) -> str:
    """What to do about a file that is damaged or another one."""
    return f"remove it and fetch it again: engram data get {entry.name}"


def check_arrays(arrays: Arrays, entry: Entry, source: str) -> None:
    """DataError unless sizes, classes and, where it has one, the content are the entry's."""
    for part, counts in zip(("train", "test"), entry.counts, strict=True):
        images: Bytes = getattr(arrays, f"x_{part}")
        labels: Bytes = getattr(arrays, f"y_{part}")
        expected = (sum(counts), *entry.shape)
        if images.shape != expected or labels.shape != expected[:1]:
            raise DataError(
                f"{entry.title} with images {expected}",
                f"{images.shape} and {labels.shape} labels in {source}",
                fetch_again(entry),
            )
        found = tuple(np.bincount(labels, minlength=len(counts)).tolist())
        if found != counts:
            raise DataError(
                f"{entry.title} with {counts} examples of its classes",
                f"{found} in {source}",
                fetch_again(entry),
            )
    check_digests(arrays, entry, source)


def check_digests(arrays: Arrays, entry: Entry | Part, source: str) -> None:
    """DataError unless the bytes are those of the entry."""
    for name, digest in entry.digests.items():
        if arrays.digest(name) != digest:
            raise DataError(
                f"{entry.title}, whose {name} has the checksum {digest[:12]}",
                f"{arrays.digest(name)[:12]} in {source}",
                fetch_again(entry),
            )
