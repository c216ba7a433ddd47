"""One small net with everything that a call could leave changed, and its data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_DATA, POSITIONS, WIDTH, CLASSES = 96, 4, 8, 3


class Net(nn.Module):
    """Attention, dropout, statistics of batches and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(POSITIONS)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, W] to [N, K]."""
        hidden: Tensor = self.head(self.attention(self.norm(self.embed(x))).mean(1))
        return hidden


def build(seed: int) -> nn.Module:
    """In training mode, with gradients, a hook and a frozen weight."""
    torch.manual_seed(seed)
    model = Net().double()
    inputs, targets = examples(seed)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    model.embed.bias.requires_grad_(False)
    model.head.register_forward_hook(lambda *_: None)
    return model


def examples(seed: int, count: int = NUM_DATA) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (count,), generator=generator)
