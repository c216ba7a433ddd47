"""The unit of every figure: plain training with Adam."""

from __future__ import annotations

from torch import Tensor, nn, optim
from torch.nn import functional

BATCH_SIZE = 256


def epoch(model: nn.Module, optimizer: optim.Optimizer, data: tuple[Tensor, Tensor]) -> None:
    """Forward, cross entropy, backward and step over all examples, in order."""
    batches = zip(*(tensor.split(BATCH_SIZE) for tensor in data), strict=True)
    for inputs, targets in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
