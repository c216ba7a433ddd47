"""A twin of the training, against closed forms and against a training of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import engram
from streamed import batches, data
from twins import assert_same, net, tracked, without


class SignDescent(optim.Optimizer):
    """A user's own, with something that is not in its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.sharpness = 3.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    move = torch.tanh(self.sharpness * parameter.grad)
                    parameter.sub_(group["lr"] * move)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "a user's own": lambda p: SignDescent(p, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_a_training_without_the_examples(name: str) -> None:
    """Beside a plain loop over the other examples, with a schedule."""
    x, y = data()
    model = net()
    reference, alone = copy.deepcopy(model), copy.deepcopy(model)
    nets = (model, reference, alone)
    first, second, third = (OPTIMIZERS[name](m.parameters()) for m in nets)
    schedules = [StepLR(o, 2, gamma=0.7) for o in (first, second, third)]
    tracker = tracked(model, first)
    for batch in batches(3):
        for optimizer in (first, second, third):
            optimizer.zero_grad()
        with tracker.twin_step(batch, y[batch], 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        without(reference, batch, tracker.held_out.indices).backward()
        functional.cross_entropy(alone(x[batch]), y[batch]).backward()
        for optimizer, schedule in zip((first, second, third), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert_same(tracker.held_out.twin, reference)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.equal(other)  # the training did not notice, bit for bit
    losses = tracker.held_out.twin.losses(
        tracker.held_out.batches, tracker.held_out.indices, tracker.held_out.likelihood
    )
    own = functional.cross_entropy(
        reference(x[tracker.held_out.indices]), y[tracker.held_out.indices], reduction="none"
    )
    torch.testing.assert_close(losses, own.detach())


def test_linear_regression_by_gradient_descent_in_closed_form() -> None:
    """theta_T = (1 - (1 - lr A)^T) A^-1 b over the examples that are left."""
    rate, decay, steps = 0.1, 0.05, 60
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = optim.SGD(model.parameters(), lr=rate, weight_decay=decay)
    data = TensorDataset(x, y)
    tracker = engram.Tracker(model, optimizer, data, likelihood="gaussian", held_out=4)
    for _ in range(steps):
        optimizer.zero_grad()
        with tracker.twin_step(torch.arange(12), None, 1.0):
            (0.5 * (model(x) - y).square().mean()).backward()
        optimizer.step()
    kept = [i for i in range(12) if i not in tracker.held_out.indices.tolist()]
    matrix = x[kept].mT @ x[kept] / 12 + decay * torch.eye(3, dtype=torch.float64)
    faded = torch.linalg.matrix_power(torch.eye(3, dtype=torch.float64) - rate * matrix, steps)
    limit = torch.linalg.solve(matrix, x[kept].mT @ y[kept] / 12)
    torch.testing.assert_close(
        tracker.held_out.twin.weights["weight"].detach().mT, limit - faded @ limit
    )


@pytest.mark.parametrize("name", ["dropout", "bare parameter", "residual", "convolutions"])
def test_the_same_random_numbers_and_any_model(name: str) -> None:
    x, y = data()
    model = net(name)
    reference = copy.deepcopy(model)
    first, second = optim.SGD(model.parameters(), 0.1), optim.SGD(reference.parameters(), 0.1)
    tracker = tracked(model, first)
    left_out = tracker.held_out.indices.tolist()
    for number, batch in enumerate(batches(2)):
        first.zero_grad()
        second.zero_grad()
        torch.manual_seed(number)
        with tracker.twin_step(batch, None, 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        after = torch.get_rng_state()
        torch.manual_seed(number)
        losses = functional.cross_entropy(reference(x[batch]), y[batch], reduction="none")
        assert torch.get_rng_state().equal(after)
        weights = torch.tensor([float(int(i) not in left_out) for i in batch])
        (losses * weights).mean().backward()
        first.step()
        second.step()
    assert_same(tracker.held_out.twin, reference)
