"""Nets of 650 to 12,000 weights, of the kinds that people train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.practical.nets import Residual, WordTransformer, block

WORDS_KNOWN = 400  # the commonest of the questions; all others are one word


def linear(inputs: int) -> nn.Module:
    """A softmax regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 10))


def mlp(inputs: int, width: int, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    """One hidden layer."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(inputs, width)]
    if norm:
        layers.append(nn.BatchNorm1d(width))
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))


def small_cnn(dropout: float = 0.0) -> nn.Module:
    """Two convolutions with BatchNorm for 8 x 8 pixels."""
    head = [nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 8), *block(8, 16), *head)


def cnn(side: int, dropout: float = 0.0) -> nn.Module:
    """The same for 14 x 14 or 16 x 16, with a hidden layer."""
    features = 16 * (side // 4) ** 2
    hidden = [nn.Linear(features, 24), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*block(1, 8), *block(8, 16), nn.Flatten(), *hidden, nn.Linear(24, 10))


def small_resnet() -> nn.Module:
    """Two residual blocks with BatchNorm."""
    stem = [nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class PatchTransformer(nn.Module):
    """An encoder of the rows of an image; their mean is classified."""

    def __init__(self, side: int, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(side, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, side, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        states = self.layer(self.embed(images[:, 0]) + self.position)
        outputs: Tensor = self.head(states.mean(1))
        return outputs


def word_transformer(dropout: float = 0.1) -> nn.Module:
    """Of two layers, for questions."""
    return WordTransformer(WORDS_KNOWN + 2, 6, width=16, dropout=dropout)
