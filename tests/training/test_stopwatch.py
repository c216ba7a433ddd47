"""The time of a training's steps: counted without its pauses, kept with the record."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import engram
from engram.training.stopwatch import PAUSE_SECONDS, PAUSE_STEPS, Stopwatch


def watched(*times: float) -> Stopwatch:
    watch = Stopwatch()
    for now in times:
        watch.reached(now)
    return watch


def test_fewer_than_two_steps_have_no_time():
    assert math.isnan(watched().seconds_per_step)
    assert math.isnan(watched(3.0).seconds_per_step)


def test_what_belongs_to_a_training_is_counted_and_a_pause_is_not():
    steps = [0.1 * n for n in range(11)]
    evaluated = watched(*steps, 1.0 + PAUSE_SECONDS)
    assert evaluated.intervals == 11
    assert evaluated.seconds == pytest.approx(1.0 + PAUSE_SECONDS)
    waited = watched(*steps, 3601.0, 3601.1)
    assert waited.intervals == 11
    assert waited.seconds_per_step == pytest.approx(0.1)


def test_long_steps_are_no_pauses():
    watch = watched(*(60.0 * n for n in range(4)), 180.0 + 60.0 * PAUSE_STEPS)
    assert watch.intervals == 4


def trained(steps: int) -> tuple[nn.Module, engram.Training]:
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 2), torch.randn(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :2]).backward()
        optimizer.step()
    return model, training


def test_a_record_knows_what_its_steps_took(tmp_path: Path):
    model, training = trained(5)
    assert training.stopwatch.intervals == 4
    assert training.seconds == pytest.approx(training.stopwatch.seconds * 5 / 4)
    assert training.of(model).seconds == training.seconds
    loaded = engram.load(training.save(tmp_path))
    assert loaded.stopwatch == training.stopwatch
    assert trained(1)[1].seconds is None


def test_a_record_goes_on_counting_where_it_was():
    _, before = trained(5)
    _, after = trained(0)
    after.load_state_dict(before.state_dict())
    assert after.stopwatch == before.stopwatch
    assert after.stopwatch is not before.stopwatch
    state = before.state_dict()
    del state["stopwatch"]  # of an earlier version
    after.load_state_dict(state)
    assert after.seconds is None


def test_a_time_that_cannot_be_is_refused():
    _, training = trained(5)
    state = training.state_dict()
    state["stopwatch"] = dict(state["stopwatch"]) | {"seconds": math.nan}
    with pytest.raises(engram.errors.StorageError):
        training.load_state_dict(state)
