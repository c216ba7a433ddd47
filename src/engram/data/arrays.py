"""Images with labels in two parts, as arrays of bytes and as tensors for a model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
NAMES = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images [N, H, W] or [N, H, W, C] and their labels [N], for training and for testing."""

    x_train: Bytes
    y_train: Bytes
    x_test: Bytes
    y_test: Bytes

    def digest(self, name: str) -> str:
        """SHA-256 of the bytes of one of the four."""
        found: Bytes = getattr(self, name)
        return hashlib.sha256(np.ascontiguousarray(found).data).hexdigest()

    def chosen(self, train: NDArray[np.intp], test: NDArray[np.intp]) -> Arrays:
        """Some of the examples, by their positions."""
        return Arrays(
            self.x_train[train], self.y_train[train], self.x_test[test], self.y_test[test]
        )


@dataclass(frozen=True, eq=False)
class Images:
    """A data set of images.

    Attributes:
        name: of the data set.
        arrays: the bytes as they are.
        classes: what each label stands for.
        source: where it was found.
    """

    name: str
    arrays: Arrays
    classes: tuple[str, ...]
    source: str

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Training images [N, C, H, W] from 0 to 1 and their labels [N], as models take them."""
        return _tensors(self.arrays.x_train, self.arrays.y_train)

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """The same for testing."""
        return _tensors(self.arrays.x_test, self.arrays.y_test)

    def __repr__(self) -> str:
        shape = " x ".join(str(size) for size in self.arrays.x_train.shape[1:])
        return (
            f"{self.name}: {len(self.arrays.x_train):,} images for training and "
            f"{len(self.arrays.x_test):,} for testing, {shape}, {len(self.classes)} classes "
            f"(from {self.source})"
        )


def _tensors(images: Bytes, labels: Bytes) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(np.array(images)).float() / 255
    pixels = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return pixels, torch.from_numpy(np.array(labels)).long()
