"""A training that nobody recorded, from what is known afterwards, against the recorded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

import engram
from engram.errors import ArgumentError, ModelMismatchError

INPUTS = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))


def trained(kind: Any, **settings: Any) -> tuple[nn.Module, Optimizer, engram.Training]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = kind(model.parameters(), **settings)
    training = engram.record(optimizer, model)
    schedule = CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        optimizer.zero_grad()
        chosen = torch.randint(64, (16,))
        loss = nn.functional.mse_loss(model(INPUTS[chosen]), INPUTS[chosen, :2])
        loss.backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, training


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (Adam, {"lr": 0.01, "weight_decay": 0.01}),
        (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (RMSprop, {"lr": 0.001, "momentum": 0.5, "weight_decay": 0.01}),
        (Adagrad, {"lr": 0.01, "weight_decay": 0.01}),
    ],
)
def test_a_guess_is_near_the_record(kind: Any, settings: dict[str, Any]) -> None:
    model, optimizer, training = trained(kind, **settings)
    guess = engram.Training.guess(model, optimizer, steps=200 if kind is SGD else None)
    assert guess.guessed
    assert not training.guessed
    assert (guess.num_steps, guess.optimizer_name) == (200, kind.__name__)
    left, right = training.of(model), guess.of(model)
    if kind is AdamW:  # a coupled weight decay is in the squares, and SGD has none
        assert left.moved == right.moved
        assert not right.moved["0.bias"]
    for name in ("0.weight", "3.weight", "3.bias"):
        ratio = float(right.time[name].mean() / left.time[name].mean())
        assert 0.5 < ratio < 2
        known, said = left.prior_precision(64)[name], right.prior_precision(64)[name]
        torch.testing.assert_close(known.mean(), said.mean(), rtol=0.7, atol=0)
    assert [(s.start, s.end) for s in right.segments(3)] == [(0, 200)]


def test_numbers_alone_are_those_of_sgd() -> None:
    model = nn.Linear(3, 2)
    said: dict[str, Any] = {"learning_rate": 0.1, "steps": 5000, "weight_decay": 0.01}
    guess = engram.Training.guess(model, momentum=0.9, **said)
    assert guess.of(model).time["weight"].item() == pytest.approx(5000 * 0.1 / (1 - 0.9))
    assert guess.of(model).prior_precision(100)["weight"].item() == pytest.approx(1.0)


def test_what_is_missing_is_asked_for() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ArgumentError, match="pass the optimizer: its state has the roots"):
        engram.Training.guess(model)
    with pytest.raises(ArgumentError, match="the state of SGD does not say how many"):
        engram.Training.guess(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ArgumentError, match="pass learning_rate=, its mean"):
        engram.Training.guess(model, SGD(model.parameters(), lr=0.0), steps=3)
    with pytest.raises(ArgumentError, match="a weight_decay of at least 0"):
        engram.Training.guess(model, learning_rate=0.1, steps=3, weight_decay=-1.0)
    with pytest.raises(ModelMismatchError, match="trains none of them"):
        engram.Training.guess(nn.Linear(1, 1), SGD(model.parameters(), lr=0.1), steps=3)
