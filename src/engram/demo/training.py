"""An ordinary training loop: Adam with weight decay, nothing of engram in it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from engram.demo.digits import NUM_CLASSES
from engram.demo.settings import Settings


def network(settings: Settings) -> nn.Sequential:
    """One hidden layer, first weights by seed; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, settings.hidden),
            nn.Tanh(),
            nn.Linear(settings.hidden, NUM_CLASSES),
        )


def adam(model: nn.Module, num_data: int, settings: Settings) -> Optimizer:
    """The regulariser delta/2 |theta|^2 on the sum of N losses is a weight decay of delta/N on
    their mean, and Adam's ``weight_decay`` is that (added to the gradient), unlike AdamW's.
    """
    decay = settings.prior_precision / num_data
    return torch.optim.Adam(model.parameters(), lr=settings.learning_rate, weight_decay=decay)


def train(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    settings: Settings,
    epochs: int,
    optimizer: Optimizer | None = None,
) -> Iterator[float]:
    """Train the model in place; yields the mean loss of every epoch."""
    optimizer = adam(model, len(inputs), settings) if optimizer is None else optimizer
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits, without a graph."""
    with torch.no_grad():
        logits: Tensor = model(inputs)
        return logits


def mean_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Nats per example."""
    inputs, labels = data
    return float(functional.cross_entropy(outputs(model, inputs), labels))
