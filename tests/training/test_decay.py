"""Weight decay: W is by how much the steps have shrunk the weights, and N W / C the prior."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import engram


def shrunk(kind: type[Optimizer], steps: int = 10, **settings: Any) -> tuple[float, Any]:
    """By how much the logarithm of a weight went down with gradients of 0, and the record."""
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = kind(model.parameters(), **settings)
    training = engram.record(optimizer, model)
    before = model.weight.detach().clone()
    for _ in range(steps):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    ratio = before / model.weight.detach()
    return float(ratio.log()), training.of(model)


def test_decoupled_decay_is_the_share_by_which_weights_shrink() -> None:
    found, named = shrunk(AdamW, lr=1e-3, weight_decay=1e-2)
    assert float(named.decay["weight"]) == pytest.approx(found, rel=1e-4)


def test_coupled_decay_of_sgd_too() -> None:
    found, named = shrunk(SGD, lr=1e-3, weight_decay=1e-2)
    assert float(named.decay["weight"]) == pytest.approx(found, rel=1e-4)
    found, named = shrunk(SGD, lr=1e-3, weight_decay=1e-2, momentum=0.9, steps=50)
    assert float(named.decay["weight"]) == pytest.approx(found, rel=1e-3)


def test_coupled_decay_is_in_one_ratio_to_the_time() -> None:
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), weight_decay=0.1)
    training = engram.record(optimizer, model)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    named = training.of(model)
    for name in named.time:
        torch.testing.assert_close(named.decay[name], 0.1 * named.time[name])
        torch.testing.assert_close(
            named.prior_precision(50)[name], torch.full_like(named.time[name], 5)
        )


def test_a_decay_that_changes_is_added_up_as_it_was() -> None:
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), weight_decay=0.1)
    training = engram.record(optimizer, model)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    before = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(6):
        optimizer.param_groups[0]["weight_decay"] = 0.1 if step < 3 else 0.4
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        now = training.of(model).time
        for name in now:
            total[name] += (0.1 if step < 3 else 0.4) * (now[name] - before[name])
        before = now
    for name, decay in training.of(model).decay.items():
        torch.testing.assert_close(decay, total[name])
