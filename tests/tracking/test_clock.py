"""Time in learning rates."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

from engram.tracking.clock import Clock


def stepped(optimizer: optim.Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_every_step_counts_with_its_own_rate() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = optim.Adam([{"params": [first], "lr": 0.4}, {"params": [second], "lr": 0.1}])
    schedule = StepLR(optimizer, 1, gamma=0.5)
    clock = Clock(optimizer)
    assert clock.elapsed({"first": first}) == {"first": 0.0}
    for _ in range(3):
        stepped(optimizer, [first, second])
        schedule.step()
    named = {"first": first, "second": second}
    assert clock.elapsed(named) == pytest.approx({"first": 0.7, "second": 0.175})
    clock.restart()
    assert clock.elapsed(named) == {"first": 0.0, "second": 0.0}


def test_the_optimizer_is_as_before_when_the_clock_is_gone() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([weight], lr=0.1)
    before = optimizer.state_dict()
    clock = Clock(optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert optimizer.state_dict() == before
    del clock
    gc.collect()
    assert len(optimizer._optimizer_step_post_hooks) == 0
