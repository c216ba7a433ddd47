"""The networks of the benchmarks, for images of 28 x 28, with any number of outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SIDE = 28


def mlp(outputs: int) -> nn.Module:
    """784-500-300, tanh."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 500),
        nn.Tanh(),
        nn.Linear(500, 300),
        nn.Tanh(),
        nn.Linear(300, outputs),
    )


def small_mlp(outputs: int) -> nn.Module:
    """784-32-16, tanh."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 32),
        nn.Tanh(),
        nn.Linear(32, 16),
        nn.Tanh(),
        nn.Linear(16, outputs),
    )


def lenet5(outputs: int) -> nn.Module:
    """Three 5 x 5 convolutions, tanh, average pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, outputs),
    )


class FilterResponseNorm(nn.Module):
    """max(gamma x / rms(x) + beta, tau): a norm and an activation that mix no examples."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.tau = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-6)
        return torch.max(self.gamma * scaled + self.beta, self.tau)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            FilterResponseNorm(channels),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            FilterResponseNorm(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.body(x) + self.shortcut(x)
        return summed


def resnet20(outputs: int) -> nn.Module:
    """Nine residual blocks with 16, 32 and 64 channels, filter response normalisation."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), FilterResponseNorm(16)]
    channels_in = 16
    for channels in (16, 32, 64):
        for number in range(3):
            stride = 2 if number == 0 and channels > 16 else 1
            layers.append(ResidualBlock(channels_in, channels, stride))
            channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, outputs))


class Transformer(nn.Module):
    """A small encoder that reads an image row by row."""

    def __init__(self, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(SIDE, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, SIDE, width))
        self.encoder = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(width, 4, 256, dropout=0.0, batch_first=True)
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.encoder(self.embed(x.squeeze(1)) + self.position)
        outputs: Tensor = self.head(tokens.mean(1))
        return outputs


NETS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "resnet20": resnet20,
    "transformer": Transformer,
}


def build(name: str, outputs: int = 10, seed: int = 0) -> nn.Module:
    """A fresh network by name; nets that differ only in outputs share the trunk's size."""
    torch.manual_seed(seed)
    return NETS[name](outputs)
