"""The pace of an optimizer, against the steps that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ivon import IVON
from torch import nn, optim

from engram.errors import PosteriorError
from engram.posteriors.pace import check_moving, pace_of, rate_of

GRADIENT = torch.tensor([0.3, -2.0, 1e-3], dtype=torch.float64)
BETAS: dict[str, Any] = {"betas": (0.9, 0.9)}  # forgets its start within the test
MADE: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=1e-4),
    "momentum": lambda p: optim.SGD(p, lr=1e-4, momentum=0.8),
    "dampening": lambda p: optim.SGD(p, lr=1e-4, momentum=0.8, dampening=0.5),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-4, alpha=0.9),
    "RMSprop with momentum": lambda p: optim.RMSprop(p, lr=1e-4, alpha=0.9, momentum=0.5),
    "Adam": lambda p: optim.Adam(p, lr=1e-4, **BETAS),
    "AMSGrad": lambda p: optim.Adam(p, lr=1e-4, amsgrad=True, **BETAS),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-4, weight_decay=0.0, **BETAS),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-4, **BETAS),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-4, **BETAS),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-4),
}


@pytest.mark.parametrize("name", MADE)
def test_a_steady_gradient_moves_the_weights_at_the_pace(name: str) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = MADE[name]([weight])
    for _ in range(400):
        before = weight.detach().clone()
        weight.grad = GRADIENT.clone()
        optimizer.step()
    pace = pace_of(optimizer, {"weight": weight})
    expected = -rate_of(optimizer.param_groups[0]) * GRADIENT / pace.preconditioner["weight"]
    assert torch.allclose(weight.detach() - before, expected, rtol=2e-3)


def test_decay_is_coupled_or_not() -> None:
    weight = nn.Parameter(torch.ones(2))
    for optimizer, expected in (
        (optim.Adam([weight], weight_decay=0.1), (0.1, 0.0)),
        (optim.AdamW([weight], weight_decay=0.1), (0.0, 0.1)),
    ):
        weight.grad = torch.ones(2)
        optimizer.step()
        pace = pace_of(optimizer, {"weight": weight})
        assert (pace.coupled["weight"], pace.decoupled["weight"]) == expected


def test_what_was_never_stepped_has_no_pace() -> None:
    stepped, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([stepped, other])
    stepped.grad = torch.ones(2)
    optimizer.step()
    assert set(pace_of(optimizer, {"stepped": stepped, "other": other}).preconditioner) == {
        "stepped"
    }


def test_an_optimizer_with_its_own_hessian_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(PosteriorError, match="expected an optimizer whose steps can be followed"):
        check_moving(IVON(model.parameters(), lr=0.1, ess=10))
