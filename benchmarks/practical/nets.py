"""The nets, small enough for a training in seconds on one core."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.practical.data import PADDING, WORDS


def block(channels_in: int, channels: int) -> list[nn.Module]:
    """Convolution, BatchNorm, ReLU, pooling."""
    return [
        nn.Conv2d(channels_in, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def fashion_cnn(dropout: float) -> nn.Module:
    """Two convolutions and a hidden layer for 28 x 28 pixels, 27,000 weights."""
    return nn.Sequential(
        *block(1, 8),
        *block(8, 16),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 32),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, 10),
    )


def cifar_cnn(dropout: float) -> nn.Module:
    """Three convolutions and a hidden layer for 32 x 32 pixels in colour, 48,000 weights."""
    return nn.Sequential(
        *block(3, 16),
        *block(16, 32),
        *block(32, 32),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 10),
    )


class ChannelsLast(nn.Module):
    """The order of memory in which small convolutions are fastest on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet20(width: int) -> nn.Module:
    """Nine residual blocks of width, 2 width and 4 width channels."""
    layers: list[nn.Module] = [
        ChannelsLast(),
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels_in = width
    for channels in (width, 2 * width, 4 * width):
        for number in range(3):
            stride = 2 if number == 0 and channels > width else 1
            layers.append(Residual(channels_in, channels, stride))
            channels_in = channels
    head = nn.Linear(4 * width, 10)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def table_mlp(dropout: float) -> nn.Module:
    """Two hidden layers for eight numbers."""
    return nn.Sequential(
        nn.Linear(8, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 2),
    )


class WordTransformer(nn.Module):
    """An encoder of word numbers, 0 after the end; the mean over the words is classified."""

    def __init__(self, words: int, outputs: int, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, WORDS, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, numbers: Tensor) -> Tensor:
        absent = numbers == PADDING
        states = self.embed(numbers) + self.position
        for layer in self.layers:
            states = layer(states, src_key_padding_mask=absent)
        present = (~absent)[:, :, None].to(states.dtype)
        outputs: Tensor = self.head((states * present).sum(1) / present.sum(1))
        return outputs
