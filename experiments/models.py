"""The paper's networks, with its numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def _dense(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for first, second in pairwise(widths[:-1]):
        layers += [nn.Linear(first, second), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def mlp_500_300() -> nn.Module:
    """Two hidden layers, hyperbolic tangents."""
    return _dense((784, 500, 300, 10), nn.Tanh)


def mlp_32_16() -> nn.Module:
    """Two small hidden layers, hyperbolic tangents."""
    return _dense((784, 32, 16, 10), nn.Tanh)


def usps_mlp() -> nn.Module:
    """Three hidden layers of 30, one logit."""
    return _dense((256, 30, 30, 30, 1), nn.Tanh)


def logistic() -> nn.Module:
    """Multinomial logistic regression on pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def lenet5() -> nn.Module:
    """Three convolutions and two dense layers."""
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
        nn.Linear(84, 10),
    )


def cnn() -> nn.Module:
    """Three convolutions and three dense layers for colour images: DeepOBS's 3c3d."""

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        nn.Conv2d(3, 64, 5),
        nn.ReLU(),
        pool(),
        nn.Conv2d(64, 96, 3),
        nn.ReLU(),
        pool(),
        nn.Conv2d(96, 128, 3, padding=1),
        nn.ReLU(),
        pool(),
        nn.Flatten(),
        nn.Linear(1152, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


class FilterResponseNorm(nn.Module):
    """max(gamma x / rms(x) + beta, tau), channel by channel: no example sees another."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        shape = (1, channels, 1, 1)
        self.gamma = nn.Parameter(torch.ones(shape))
        self.beta = nn.Parameter(torch.zeros(shape))
        self.tau = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6)
        # the larger of two, by a ReLU: its backward pass is a third of that of torch.maximum
        return functional.relu(self.gamma * scaled + (self.beta - self.tau)) + self.tau


class Residual(nn.Module):
    """Two convolutions beside a shortcut, each with its norm."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1),
            FilterResponseNorm(channels),
            nn.Conv2d(channels, channels, 3, 1, 1),
            FilterResponseNorm(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, channels, 1, stride), FilterResponseNorm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x) + self.shortcut(x)
        return found


def resnet20() -> nn.Module:
    """Nine residual blocks of 16, 32 and 64 channels, filter response normalisation."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1), FilterResponseNorm(16)]
    before = 16
    for channels in (16, 32, 64):
        for place in range(3):
            stride = 2 if place == 0 and channels > 16 else 1
            layers.append(Residual(before, channels, stride))
            before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp_500_300": mlp_500_300,
    "mlp_32_16": mlp_32_16,
    "usps_mlp": usps_mlp,
    "logistic": logistic,
    "lenet5": lenet5,
    "cnn": cnn,
    "resnet20": resnet20,
}
# parameters, as the paper states or rounds them
SIZES = {
    "mlp_500_300": 545_810,
    "mlp_32_16": 25_818,
    "usps_mlp": 9_601,
    "logistic": 7_850,
    "lenet5": 61_706,
    "cnn": 895_210,
    "resnet20": 274_042,
}


def make(name: str, seed: int) -> nn.Module:
    """A network with first weights from a seed; its size is the paper's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
    size = sum(p.numel() for p in model.parameters())
    assert size == SIZES[name], f"{name} has {size:,} parameters, the paper's {SIZES[name]:,}"
    return model
