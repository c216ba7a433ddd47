"""Trainings with a twin beside them, and what the twin is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import engram
from engram.tracking.held_out_twin import HeldOutTwin
from streamed import MODELS, data

COUNT = 7


def net(name: str = "tanh") -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name][0]().double()


def tracked(
    model: nn.Module, optimizer: optim.Optimizer, reduction: str = "mean"
) -> engram.Tracker:
    """A tracker with a twin, of any optimizer: its posterior plays no part."""
    fitted = {"posterior": "diagonal", "prior_precision": 1.0, "reduction": reduction}
    return engram.Tracker(model, optimizer, data(), held_out=COUNT, **fitted)


def without(model: nn.Module, batch: Tensor, left_out: Tensor) -> Tensor:
    """The loss of a batch with the examples left out, still over the size of the batch."""
    x, y = data()
    losses = functional.cross_entropy(model(x[batch]), y[batch], reduction="none")
    kept = torch.tensor([int(i) not in left_out.tolist() for i in batch])
    return losses[kept].sum() / len(batch)


def assert_same(twin: HeldOutTwin, reference: nn.Module) -> None:
    found = twin.weights
    for name, weight in reference.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = [p.detach().clone() for p in model.parameters()]
    yield
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.equal(value)
