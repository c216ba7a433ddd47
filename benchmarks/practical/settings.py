"""The settings by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn, optim

from benchmarks.practical import data, nets
from benchmarks.practical.loop import Setting, cosine, flipped

Optimizer = Callable[[nn.Module], optim.Optimizer]


def adamw(learning_rate: float, weight_decay: float) -> Optimizer:
    """AdamW for all parameters."""

    def make(model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)

    return make


def sgd(learning_rate: float, weight_decay: float) -> Optimizer:
    """SGD with momentum 0.9 for all parameters."""

    def make(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(
            model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=weight_decay
        )

    return make


def word_transformer() -> nn.Module:
    """For the words and the six kinds of answers of TREC."""
    return nets.WordTransformer(data.vocabulary(), 6)


SETTINGS: dict[str, Setting] = {
    "fmnist-adamw": Setting(
        split=partial(data.fashion, 3000, data.uniform),
        net=partial(nets.fashion_cnn, 0.3),
        optimizer=adamw(2e-3, 1e-2),
        epochs=12,
    ),
    "cifar-adamw": Setting(
        split=partial(data.cifar, 3000, data.class_dependent),
        net=partial(nets.cifar_cnn, 0.3),
        optimizer=adamw(2e-3, 1e-2),
        epochs=12,
        augment=flipped,
    ),
    "fmnist-memorised": Setting(
        split=partial(data.fashion, 2000, data.uniform),
        net=partial(nets.fashion_cnn, 0.0),
        optimizer=adamw(2e-3, 1e-2),
        epochs=40,
    ),
    "fmnist-sgd": Setting(
        split=partial(data.fashion, 3000, None),
        net=partial(nets.fashion_cnn, 0.3),
        optimizer=sgd(0.05, 5e-4),
        epochs=12,
        schedule=cosine,
    ),
    "trec-transformer": Setting(
        split=partial(data.questions, 3000, data.uniform),
        net=word_transformer,
        optimizer=adamw(1e-3, 1e-2),
        epochs=8,
    ),
    "fair-mlp": Setting(
        split=partial(data.affairs, 4000),
        net=partial(nets.table_mlp, 0.2),
        optimizer=adamw(2e-3, 1e-2),
        epochs=40,
    ),
    "resnet20-sgd": Setting(
        split=partial(data.cifar, 2000, None),
        net=partial(nets.resnet20, 8),
        optimizer=sgd(0.1, 5e-4),
        epochs=12,
        schedule=cosine,
        subsets=40,
    ),
}
