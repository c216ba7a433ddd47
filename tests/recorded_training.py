"""A small net trained as people train, recorded such that it can be walked again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import engram

NUMBER, EPOCHS, BATCH = 40, 3, 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(NUMBER) % 3
    return torch.randn(NUMBER, 4, generator=generator) + torch.eye(3, 4)[y], y


def recorded(decay: float = 0.01) -> tuple[nn.Module, tuple[Tensor, Tensor], engram.Training]:
    """Mini-batches, BatchNorm and AdamW; the examples of every step are noted."""
    x, y = examples()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=decay)
        training = engram.record(optimizer, model, replay=True)
        for _ in range(EPOCHS):
            for rows in torch.randperm(NUMBER).split(BATCH):
                training.note(rows)
                optimizer.zero_grad()
                functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        training.stop()
    return model.eval(), (x, y), training


def fit(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """The same kind of training, from whatever the model is."""
    x, y = data
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
