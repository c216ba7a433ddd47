"""Clipped gradients count as the share that is left of them; so do bad steps as none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer

import engram
from engram.errors import ArgumentError, ModelMismatchError, NonFiniteError, TrainingError

LIMIT = 0.5


def problem() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double(), torch.randn(20, 4, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return ((model(inputs) - 5) ** 2).mean()


def test_the_time_of_sgd_counts_the_share_that_is_left() -> None:
    model, inputs = problem()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
    training = engram.record(optimizer, model)
    time = decay = buffer = decay_buffer = 0.0
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        share = min(1.0, LIMIT / float(clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        buffer, decay_buffer = 0.8 * buffer + share, 0.8 * decay_buffer + 1
        time += 0.1 * buffer
        decay += 0.1 * 0.01 * decay_buffer
    named = training.of(model)
    assert 0 < time < 0.9 * decay / 0.01
    assert named.time["weight"].item() == pytest.approx(time, rel=1e-5)
    assert named.decay["weight"].item() == pytest.approx(decay, rel=1e-9)
    assert training.sees_clipping


def test_the_time_of_adam_counts_the_average_share() -> None:
    model, inputs = problem()
    optimizer = Adam(model.parameters(), lr=0.1, weight_decay=0.01)
    training = engram.record(optimizer, model)
    average, time, decay = 0.0, torch.zeros(()), torch.zeros(())
    for step in range(1, 16):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        share = min(1.0, LIMIT / float(clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        average = 0.9 * average + 0.1 * share
        square = optimizer.state[model.weight]["exp_avg_sq"] / (1 - 0.999**step)
        inverse = 0.1 / (square.sqrt() + 1e-8)
        time = time + inverse * average / (1 - 0.9**step)
        decay = decay + 0.01 * inverse
    named = training.of(model)
    torch.testing.assert_close(named.time["weight"], time, rtol=1e-5, atol=0)
    torch.testing.assert_close(named.decay["weight"], decay, rtol=1e-5, atol=0)
    whole = named.segments(1)[0].decay["weight"]
    torch.testing.assert_close(whole, named.decay["weight"], rtol=1e-12, atol=0)


def test_accumulated_gradients_are_not_clipped_ones() -> None:
    model, inputs = problem()
    optimizer = SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        for part in inputs.split(5):
            (loss_of(model, part) / 4).backward()
        optimizer.step()
    assert training.of(model).time["weight"].item() == pytest.approx(0.3)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_under_a_scaler(given: bool, fused: bool) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.randn(20, 4)
    optimizer = Adam(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    training = engram.record(optimizer, model, scaler=scaler if given else None)
    plain = Adam(nn.Linear(1, 1).parameters(), lr=0.1)
    assert engram.record(plain).sees_clipping
    for step in range(6):
        optimizer.zero_grad()
        factor = math.inf if step == 2 else 1.0  # a step that the scaler skips
        scaler.scale(loss_of(model, inputs) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert training.num_steps == 5
    assert training.num_bad_steps == 0
    assert training.sees_clipping is given
    assert int(optimizer.state[model.weight]["step"]) == 5
    assert float(training.of(model).time["weight"].mean()) > 0


def test_clipping_under_a_scaler_is_seen_where_the_scaler_is_given() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3), torch.randn(20, 4)
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    training = engram.record(optimizer, model, scaler=scaler)
    time = 0.0
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs)).backward()
        scaler.unscale_(optimizer)
        time += 0.01 * min(1.0, LIMIT / float(clip_grad_norm_(model.parameters(), LIMIT)))
        scaler.step(optimizer)
        scaler.update()
    assert training.of(model).time["weight"].item() == pytest.approx(time, rel=1e-4)


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_steps_that_are_not_finite_are_counted_and_add_nothing(kind: Any) -> None:
    model, inputs = problem()
    optimizer = kind(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model)
    before: dict[str, torch.Tensor] = {}
    for step in range(60):
        if step == 50:
            before = training.of(model).time
        optimizer.zero_grad()
        (loss_of(model, inputs) * (math.nan if step >= 50 else 1)).backward()
        optimizer.step()
    assert training.num_bad_steps == 10
    for name, time in training.of(model).time.items():  # Adam's last root went with the first one
        torch.testing.assert_close(time, before[name], rtol=1e-12 if kind is SGD else 0.03, atol=0)


def test_negative_learning_rates_are_bad_steps() -> None:
    model, inputs = problem()
    optimizer = SGD(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.01 if step < 3 else -0.01
        loss_of(model, inputs).backward()
        optimizer.step()
    assert training.num_bad_steps == 1
    assert training.of(model).time["weight"].item() == pytest.approx(0.03)


def test_what_says_nothing_is_refused() -> None:
    model, inputs = problem()
    optimizer = SGD(model.parameters(), lr=0.0)
    training = engram.record(optimizer, model)
    with pytest.raises(TrainingError, match="a record of at least one step; got 0 steps"):
        training.of(model)
    loss_of(model, inputs).backward()
    optimizer.step()
    with pytest.raises(TrainingError, match="training time above 0; got learning rates of 0"):
        training.of(model)


def test_a_root_of_zero_is_told() -> None:
    model, inputs = problem()
    optimizer = Adam(model.parameters(), eps=0.0)
    training = engram.record(optimizer, model)
    optimizer.zero_grad()
    (model(inputs * torch.tensor([1.0, 1, 1, 0])) ** 2).mean().backward()
    optimizer.step()
    with pytest.raises(NonFiniteError, match="positive eps"):
        training.of(model)


def test_one_record_of_an_optimizer() -> None:
    model, _ = problem()
    optimizer = SGD(model.parameters(), lr=0.1)
    first = engram.record(optimizer)
    with pytest.raises(TrainingError, match=r"end it before with its stop\(\)"):
        engram.record(optimizer)
    first.stop()
    assert engram.record(optimizer).is_recording


def test_wrong_arguments() -> None:
    model, _ = problem()
    optimizer = SGD(model.parameters(), lr=0.1)
    given: Any = model
    with pytest.raises(ArgumentError, match=r"a torch.optim.Optimizer; got Linear"):
        engram.record(given)
    with pytest.raises(ModelMismatchError, match="trains none of them"):
        engram.record(optimizer, nn.Linear(4, 3))
    with pytest.raises(ArgumentError, match="training_batch_size"):
        engram.record(optimizer, reduction="sum")
    own = engram.optimizers.Newton(model.parameters(), num_data=2, prior_precision=1.0)
    with pytest.raises(ArgumentError, match="train with the mean loss"):
        engram.record(own, reduction="sum", training_batch_size=4)


def test_a_sum_over_the_batch_counts_as_so_many_means() -> None:
    model, inputs = problem()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.2)
    training = engram.record(optimizer, model, reduction="sum", training_batch_size=20)
    loss_of(model, inputs).backward()
    optimizer.step()
    named = training.of(model)
    assert named.time["weight"].item() == pytest.approx(2.0)
    assert named.prior_precision(100)["weight"].item() == pytest.approx(0.2 * 100 / 20)


class Signed(Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / 4


def test_an_unknown_optimizer_is_taught() -> None:
    model, inputs = problem()
    with pytest.raises(TrainingError, match=r"got Signed.*metrics\.register"):
        engram.record(Signed(model.parameters()))
    from engram.training import metrics

    metrics.register("Signed", lambda step: 4.0)
    try:
        optimizer = Signed(model.parameters())
        training = engram.record(optimizer)
        loss_of(model, inputs).backward()
        optimizer.step()
        assert training.of(model).time["weight"].item() == pytest.approx(0.1 / 4)
    finally:
        metrics.METRICS.pop("Signed")


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_what_training_cannot_move_is_told(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 3)),
    )
    optimizer = kind(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model)
    inputs, labels = torch.randn(64, 1, 8, 8), torch.randint(3, (64,))
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    moved = training.of(model).moved
    assert [name for name, value in moved.items() if not value] == ["0.bias", "3.bias"]


def test_a_record_that_began_late_says_so() -> None:
    model, inputs = problem()
    optimizer = Adam(model.parameters(), lr=0.01)
    training = None
    for step in range(5):
        if step == 3:
            training = engram.record(optimizer, model)
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        optimizer.step()
    assert training is not None
    assert (training.num_missing_steps, training.num_steps) == (3, 2)
