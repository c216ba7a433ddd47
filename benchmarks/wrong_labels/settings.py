"""The nets and data, with a tenth of the labels made wrong."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn, optim

from benchmarks.data import data_file
from benchmarks.practical import data, nets
from benchmarks.practical.loop import Setting, cosine, flipped
from benchmarks.practical.settings import adamw, sgd

# the class of Fashion-MNIST that each is taken for: T-shirt, trousers, pullover, dress, coat,
# sandal, shirt, sneaker, bag, boot
TAKEN_FOR = torch.tensor([6, 3, 4, 2, 6, 7, 2, 9, 3, 7])


def like_clothes(labels: Tensor, generator: torch.Generator) -> Tensor:
    """The class of Fashion-MNIST that it is easily taken for."""
    return TAKEN_FOR[labels]


def post(count: int) -> data.Split:
    """Some digits of USPS, 16 x 16 pixels, with uniform noise."""
    with np.load(data_file("usps.npz")) as arrays:
        parts = [torch.from_numpy(arrays[f"x_{part}"]) for part in ("train", "test")]
        labels = [torch.from_numpy(arrays[f"y_{part}"]).long() for part in ("train", "test")]
    images = [part[:, None].float() / 255 for part in parts]
    return data._split(images, labels, count, data.uniform)


def digits_cnn() -> nn.Module:
    """Two convolutions with GroupNorm and BatchNorm, pooled over all positions, 6,000 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2),
        nn.GroupNorm(3, 12),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(24 * 16, 10),
    )


def cnn(split: partial[data.Split], net: partial[nn.Module], epochs: int = 12) -> Setting:
    """With AdamW."""
    return Setting(split=split, net=net, optimizer=adamw(2e-3, 1e-2), epochs=epochs)


def radam(model: nn.Module) -> optim.Optimizer:
    """RAdam, on which nothing was chosen."""
    return optim.RAdam(model.parameters(), lr=3e-3, weight_decay=1e-4)


FASHION, CIFAR = partial(nets.fashion_cnn, 0.3), partial(nets.cifar_cnn, 0.3)
SETTINGS: dict[str, Setting] = {
    "fmnist-uniform": cnn(partial(data.fashion, 3000, data.uniform), FASHION),
    "fmnist-classes": cnn(partial(data.fashion, 3000, like_clothes), FASHION),
    "cifar-uniform": Setting(
        split=partial(data.cifar, 3000, data.uniform),
        net=CIFAR,
        optimizer=sgd(0.05, 5e-4),
        epochs=10,
        schedule=cosine,
        augment=flipped,
    ),
    "cifar-classes": Setting(
        split=partial(data.cifar, 3000, data.class_dependent),
        net=CIFAR,
        optimizer=adamw(2e-3, 1e-2),
        epochs=10,
        augment=flipped,
    ),
    "fmnist-memorised": cnn(
        partial(data.fashion, 2000, data.uniform), partial(nets.fashion_cnn, 0.0), 40
    ),
    # nothing was chosen on this one: another data set, net and optimizer
    "usps-untuned": Setting(split=partial(post, 3000), net=digits_cnn, optimizer=radam, epochs=10),
}
