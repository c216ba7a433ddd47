"""The steps of a history are whole numbers that do not go back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import engram
from engram.errors import ArgumentError
from streamed import BATCH, NUM_DATA, backward, build, data


def trained() -> tuple[torch.nn.Module, engram.Tracker]:
    model, optimizer = build()
    backward(model, torch.arange(NUM_DATA))
    optimizer.step()
    return model, engram.Tracker(model, optimizer, data())


@pytest.mark.parametrize("step", [float("nan"), 2.0, True, -1, "3", [1], np.float64(3), np.nan])
def test_a_step_is_a_whole_number(step: Any) -> None:
    model, tracker = trained()
    with pytest.raises(ArgumentError, match="a whole step"):
        tracker.update(step=step)
    with pytest.raises(ArgumentError, match="a whole step"), tracker.step([0, 1], epoch=step):
        backward(model, torch.arange(2))
    with tracker.step(torch.arange(BATCH)):
        backward(model, torch.arange(BATCH))
    with pytest.raises(ArgumentError, match="a whole step"):
        tracker.finish_epoch(step=step)
    assert len(tracker.history) == 0
    assert tracker.stream.epoch.seen == BATCH


def test_numpys_integers_are_integers() -> None:
    _, tracker = trained()
    tracker.update(step=np.int64(4))
    tracker.update()
    assert [record.step for record in tracker.history] == [4, 5]
    assert all(type(record.step) is int for record in tracker.history)


def test_steps_do_not_go_back() -> None:
    model, tracker = trained()
    for batch in torch.arange(NUM_DATA).split(BATCH):
        with tracker.step(batch, epoch=7):
            backward(model, batch)
    tracker.update(step=9)
    tracker.update(step=9)
    with pytest.raises(ArgumentError, match="at least 9"):
        tracker.update(step=8)
    with pytest.raises(ArgumentError, match="at least 9"), tracker.step([0], epoch=3):
        backward(model, torch.arange(1))
    with pytest.raises(ArgumentError, match="at least 0 and at most 9"):
        tracker.finish_epoch(step=10)
    assert tracker.finish_epoch(step=8).step == 8
    assert [record.step for record in tracker.history] == [8, 9, 9]
