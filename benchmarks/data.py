"""Images of Fashion-MNIST's size: the real ones where ENGRAM_DATA has them, else random ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.nets import SIDE

FULL_SIZE = 60_000
FILE = "fmnist.npz"


@dataclass(frozen=True)
class Images:
    """Inputs [N, 1, 28, 28] in [0, 1], targets [N] in 0..9, and where they come from."""

    inputs: Tensor
    targets: Tensor
    source: str

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """The first examples, as engram takes them."""
        return self.inputs[:count], self.targets[:count]


def images(count: int, seed: int = 0) -> Images:
    """The first training images; cost does not depend on which pictures they show."""
    if not 1 <= count <= FULL_SIZE:
        raise SystemExit(f"expected 1 to {FULL_SIZE} examples, got {count}")
    path = Path(os.environ.get("ENGRAM_DATA", "")) / FILE
    if path.is_file():
        with np.load(path) as arrays:
            pixels = torch.from_numpy(arrays["x_train"][:count])
            targets = torch.from_numpy(arrays["y_train"][:count]).long()
        return Images(pixels[:, None].float() / 255, targets, "Fashion-MNIST")
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 1, SIDE, SIDE, generator=generator)
    targets = torch.randint(10, (count,), generator=generator)
    return Images(inputs, targets, "random images of Fashion-MNIST's size")


def data_file(name: str) -> Path:
    """A file of the folder that ENGRAM_DATA names."""
    path = Path(os.environ.get("ENGRAM_DATA", "")) / name
    if not path.is_file():
        raise SystemExit(f"expected ENGRAM_DATA to name a folder with {name}")
    return path


def train_and_test(name: str) -> tuple[Images, Images]:
    """Both parts of a real data set, ``mnist`` or ``fmnist``: accuracies mean nothing on others."""
    with np.load(data_file(f"{name}.npz")) as arrays:
        train, test = (
            Images(
                torch.from_numpy(arrays[f"x_{part}"])[:, None].float() / 255,
                torch.from_numpy(arrays[f"y_{part}"]).long(),
                name,
            )
            for part in ("train", "test")
        )
    return train, test
