"""The trainings of the study by name: kinds of nets, data, optimizers, schedules, lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.practical.loop import Setting, cosine, flipped, one_cycle
from benchmarks.practical.settings import adamw, sgd
from benchmarks.trust.practical import nets
from benchmarks.trust.practical.data import split

SUBSETS = 32  # trainings for the truth
SIDES = {"digits": 8, "fashion": 14, "usps": 16}


def shifted(images: Tensor) -> Tensor:
    """Every image moved by up to a pixel."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return images.roll((down, right), (2, 3))


def plain_sgd(learning_rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """SGD without momentum and decay."""
    return lambda model: torch.optim.SGD(model.parameters(), lr=learning_rate)


def adam(learning_rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Adam without decay."""
    return lambda model: torch.optim.Adam(model.parameters(), lr=learning_rate)


def _mlp(data: str, width: int, dropout: float = 0.0, norm: bool = False) -> partial[nn.Module]:
    return partial(nets.mlp, SIDES[data] ** 2, width, dropout, norm)


def _of(
    data: str,
    count: int,
    noise: float,
    net: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    epochs: int,
    **others: object,
) -> Setting:
    return Setting(
        partial(split, data, count, noise), net, optimizer, epochs, 32, subsets=SUBSETS, **others
    )


_digits, _fashion = partial(_of, "digits"), partial(_of, "fashion")
_usps, _questions = partial(_of, "usps"), partial(_of, "questions")
_small = nets.small_cnn
_patches = partial(nets.PatchTransformer, 8)
_words = nets.word_transformer

SETTINGS: dict[str, Setting] = {
    "mlp-1": _digits(400, 0.0, _mlp("digits", 16), sgd(0.05, 0.0), 5),
    "mlp-2": _digits(400, 0.05, _mlp("digits", 16), sgd(0.05, 1e-3), 40),
    "mlp-3": _digits(400, 0.1, _mlp("digits", 16), adam(1e-2), 20),
    "mlp-4": _digits(400, 0.0, _mlp("digits", 32), adamw(1e-2, 0.1), 30, schedule=cosine),
    "mlp-5": _digits(400, 0.1, _mlp("digits", 32), adam(1e-2), 100),
    "mlp-6": _digits(400, 0.1, _mlp("digits", 32, 0.3, True), adamw(5e-3, 1e-2), 20),
    "mlp-7": _digits(400, 0.0, _mlp("digits", 32), plain_sgd(0.2), 15),
    "mlp-8": _digits(300, 0.2, _mlp("digits", 16), adamw(5e-3, 1.0), 60, schedule=one_cycle),
    "mlp-9": _usps(500, 0.0, _mlp("usps", 24), adamw(2e-3, 1e-2), 15, schedule=one_cycle),
    "mlp-10": _usps(500, 0.1, _mlp("usps", 24), sgd(0.02, 1e-3), 60, schedule=cosine),
    "mlp-11": _usps(500, 0.0, _mlp("usps", 24), adam(3e-3), 100),
    "mlp-12": _fashion(600, 0.0, _mlp("fashion", 24), adamw(2e-3, 1e-2), 10),
    "mlp-13": _fashion(600, 0.1, _mlp("fashion", 24), adamw(5e-3, 1e-2), 40),
    "mlp-14": _fashion(600, 0.0, _mlp("fashion", 24), sgd(0.02, 5e-3), 50),
    "mlp-15": _fashion(
        600, 0.1, _mlp("fashion", 24, 0.3, True), adamw(5e-3, 1e-2), 20, schedule=cosine
    ),
    "cnn-1": _digits(400, 0.0, _small, adamw(5e-3, 1e-2), 8),
    "cnn-2": _digits(400, 0.1, _small, adamw(5e-3, 1e-2), 25),
    "cnn-3": _digits(400, 0.0, _small, sgd(0.05, 5e-4), 20, schedule=cosine),
    "cnn-4": _digits(400, 0.0, _small, sgd(0.05, 5e-4), 5),
    "cnn-5": _digits(400, 0.1, _small, adam(1e-2), 50),
    "cnn-6": _digits(400, 0.1, _small, adamw(5e-3, 1e-2), 25, augment=shifted),
    "cnn-7": _digits(400, 0.2, partial(_small, 0.3), sgd(0.05, 5e-4), 30),
    "cnn-8": _digits(300, 0.0, _small, adamw(2e-3, 1e-2), 15),
    "cnn-9": _fashion(600, 0.0, partial(nets.cnn, 14), adamw(3e-3, 1e-2), 12),
    "cnn-10": _fashion(600, 0.1, partial(nets.cnn, 14, 0.3), adamw(3e-3, 1e-2), 12),
    "cnn-11": _fashion(600, 0.1, partial(nets.cnn, 14), adamw(3e-3, 1e-2), 35),
    "cnn-12": _fashion(600, 0.0, partial(nets.cnn, 14), sgd(0.03, 5e-4), 15, schedule=cosine),
    "cnn-13": _fashion(600, 0.1, partial(nets.cnn, 14), sgd(0.03, 5e-4), 30, schedule=cosine),
    "cnn-14": _fashion(600, 0.1, partial(nets.cnn, 14), adamw(3e-3, 1e-2), 20, augment=flipped),
    "cnn-15": _usps(500, 0.0, partial(nets.cnn, 16), adamw(2e-3, 1e-2), 10, schedule=one_cycle),
    "cnn-16": _usps(500, 0.1, partial(nets.cnn, 16, 0.3), adam(3e-3), 25),
    "cnn-17": _usps(500, 0.0, partial(nets.cnn, 16), sgd(0.03, 5e-4), 5),
    "cnn-18": _usps(300, 0.05, partial(nets.cnn, 16), adamw(3e-3, 0.3), 40),
    "resnet-1": _digits(400, 0.0, nets.small_resnet, sgd(0.05, 5e-4), 10, schedule=cosine),
    "resnet-2": _digits(400, 0.1, nets.small_resnet, sgd(0.05, 5e-4), 20, schedule=cosine),
    "resnet-3": _digits(400, 0.0, nets.small_resnet, adamw(5e-3, 1e-2), 10),
    "resnet-4": _digits(400, 0.1, nets.small_resnet, adamw(5e-3, 1e-2), 30),
    "resnet-5": _digits(400, 0.1, nets.small_resnet, sgd(0.05, 5e-4), 20, augment=shifted),
    "resnet-6": _fashion(400, 0.0, nets.small_resnet, sgd(0.02, 5e-4), 8, schedule=one_cycle),
    "transformer-1": _digits(400, 0.0, _patches, adamw(3e-3, 1e-2), 20),
    "transformer-2": _digits(400, 0.1, partial(_patches, dropout=0.1), adamw(3e-3, 1e-2), 30),
    "transformer-3": _digits(400, 0.1, _patches, adam(5e-3), 50),
    "transformer-4": _questions(600, 0.0, _words, adamw(3e-3, 1e-2), 8),
    "transformer-5": _questions(600, 0.1, _words, adamw(3e-3, 1e-2), 16),
    "transformer-6": _questions(
        600, 0.0, partial(_words, 0.0), adamw(3e-3, 1e-2), 25, schedule=cosine
    ),
    "transformer-7": _questions(400, 0.0, _words, adam(2e-3), 5),
    "linear-1": _digits(300, 0.0, partial(nets.linear, 64), adamw(1e-2, 1e-2), 20),
    "linear-2": _digits(300, 0.1, partial(nets.linear, 64), sgd(0.1, 1e-3), 100),
}
