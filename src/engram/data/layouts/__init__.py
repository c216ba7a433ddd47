"""Forms in which others keep these data sets; one a file, each with ``find`` and ``read``.

``find`` says where below a folder a data set is in this form, or None; ``read`` makes arrays of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engram.data.arrays import Arrays
from engram.data.catalogue import Entry
from engram.data.layouts import (
    cifar_binary,
    cifar_python,
    hugging_face,
    idx,
    libsvm,
    npz,
    sprites,
)


@dataclass(frozen=True)
class Layout:
    """A form of a data set: its name for people, where it is, and how it is read."""

    name: str
    find: Callable[[Path, Entry], Path | None]
    read: Callable[[Path, Entry], Arrays]


LAYOUTS = (
    Layout("npz", npz.find, npz.read),
    Layout("idx", idx.find, idx.read),
    Layout("CIFAR's binary files", cifar_binary.find, cifar_binary.read),
    Layout("torchvision's batches", cifar_python.find, cifar_python.read),
    Layout("libsvm", libsvm.find, libsvm.read),
    Layout("a Hugging Face dataset", hugging_face.find, hugging_face.read),
    Layout("images in rows", sprites.find, sprites.read),
)
