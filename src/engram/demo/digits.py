"""1797 images of handwritten digits, some training labels made wrong on purpose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from engram.demo.settings import Settings

NUM_CLASSES = 10
BRIGHTEST = 16.0  # of a pixel in scikit-learn's data


@dataclass(frozen=True)
class Digits:
    """Images [N, 8, 8] between 0 and 1, with the labels a user would see and the right ones."""

    inputs: Tensor
    labels: Tensor
    true_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def flipped(self) -> Tensor:
        """Which training labels are wrong, [N]."""
        return self.labels != self.true_labels

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Training images with the labels as given."""
        return self.inputs, self.labels

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Test images with their right labels."""
        return self.test_inputs, self.test_labels


def digits(settings: Settings) -> Digits:
    """Split the images and flip some training labels, by seed."""
    source = load_digits()
    images = torch.tensor(source.images, dtype=torch.float32) / BRIGHTEST
    labels = torch.tensor(source.target, dtype=torch.int64)
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(images), generator=generator)
    train, test = order[: settings.num_train], order[settings.num_train :]
    given = flipped(labels[train], settings.flipped_share, generator)
    return Digits(images[train], given, labels[train], images[test], labels[test])


def flipped(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of the labels replaced by another class, each other class alike."""
    count = round(share * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    shift = torch.randint(1, NUM_CLASSES, (count,), generator=generator)
    changed = labels.clone()
    changed[chosen] = (changed[chosen] + shift) % NUM_CLASSES
    return changed
