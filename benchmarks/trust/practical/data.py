"""A few hundred examples each of four public data sets, some labels made wrong on purpose."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from benchmarks.data import data_file
from benchmarks.practical.data import PADDING, UNKNOWN, Split, questions, uniform
from benchmarks.trust.practical.nets import WORDS_KNOWN

NUM_TEST = 1000
Parts = tuple[list[Tensor], list[Tensor]]  # inputs and labels, to train and to test


def split(name: str, count: int, noise: float, seed: int = 0) -> Split:
    """So many examples to train on, of which a share is given another class."""
    inputs, labels = LOADERS[name]()
    generator = torch.Generator().manual_seed(seed)
    train = torch.randperm(len(labels[0]), generator=generator)[:count]
    test = torch.randperm(len(labels[1]), generator=generator)[:NUM_TEST]
    right, test_right = labels[0][train], labels[1][test]
    given, test_given = (_noisy(part, noise, generator) for part in (right, test_right))
    return Split(inputs[0][train], given, right, inputs[1][test], test_right, test_given)


def _noisy(right: Tensor, share: float, generator: torch.Generator) -> Tensor:
    chosen = torch.randperm(len(right), generator=generator)[: round(share * len(right))]
    given = right.clone()
    given[chosen] = uniform(right, generator)[chosen]
    return given


def _digits() -> Parts:
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    kinds, order = torch.tensor(labels), torch.randperm(len(labels), generator=_fixed())
    parts = order[:800], order[800:]
    return [pixels[part] for part in parts], [kinds[part] for part in parts]


def _stored(file: str) -> Parts:
    with np.load(data_file(file)) as arrays:
        images = [torch.from_numpy(arrays[f"x_{part}"]) for part in ("train", "test")]
        labels = [torch.from_numpy(arrays[f"y_{part}"]).long() for part in ("train", "test")]
    return [part[:, None].float() / 255 for part in images], labels


def _fashion() -> Parts:
    images, labels = _stored("fmnist.npz")
    return [functional.avg_pool2d(part, 2) for part in images], labels


def _usps() -> Parts:
    return _stored("usps.npz")


def _questions() -> Parts:
    found = questions(5000, None)
    times = torch.bincount(found.inputs.flatten(), minlength=int(found.test_inputs.max()) + 1)
    times[[PADDING, UNKNOWN]] = 0
    common = times.argsort(descending=True)[:WORDS_KNOWN]
    numbers = torch.full((len(times),), UNKNOWN)
    numbers[PADDING] = PADDING
    numbers[common] = torch.arange(UNKNOWN + 1, UNKNOWN + 1 + WORDS_KNOWN)
    return [numbers[found.inputs], numbers[found.test_inputs]], [found.right, found.test_right]


def _fixed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


LOADERS = {"digits": _digits, "fashion": _fashion, "usps": _usps, "questions": _questions}
