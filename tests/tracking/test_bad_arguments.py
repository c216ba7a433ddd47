"""What a tracker is given wrongly is refused with what was expected, when it is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import engram
from engram.errors import ArgumentError, DataError, EngineError, ModelMismatchError
from streamed import BATCH, NUM_DATA, backward, build, data

FIRST = torch.arange(BATCH)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "torch.nn.Module"),
        ({"model": lambda x: x}, "torch.nn.Module"),
        ({"optimizer": None, "posterior": "kronecker"}, "torch.optim.Optimizer"),
        ({"optimizer": [], "posterior": "kronecker"}, "torch.optim.Optimizer"),
        ({"training_batch_size": "8"}, "batch_size"),
        ({"training_batch_size": 2.5}, "batch_size"),
        ({"training_batch_size": True}, "batch_size"),
        ({"posterior": "diagonal", "average": "0.9"}, "an average"),
        ({"posterior": "diagonal", "average": float("nan")}, "an average"),
    ],
)
def test_settings_are_checked_when_given(given: dict[str, Any], message: str) -> None:
    model, optimizer = build()
    settings = {"model": model, "optimizer": optimizer, "data": data(), "prior_precision": 1.0}
    with pytest.raises(ArgumentError, match=message):
        engram.Tracker(**{**settings, **given})


def test_posterior_of_asks_for_a_module() -> None:
    _, optimizer = build()
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module"):
        engram.posterior_of(optimizer, None, num_data=NUM_DATA)


@pytest.mark.parametrize(
    "targets", [data()[1][:7], data()[1][:9], [0] * 8, "x", np.zeros(8), torch.tensor(1)], ids=str
)
def test_targets_are_a_row_each(targets: Any) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    with pytest.raises(DataError, match="one for each index"), tracker.step(FIRST, targets):
        backward(model, FIRST)


@pytest.mark.parametrize(
    "indices",
    [{0, 1}, "01", 8, FIRST[:, None], [], {0: 1}, ["0"], torch.tensor(3), [None], FIRST.bool()],
    ids=str,
)
def test_indices_are_whole_numbers_in_a_row(indices: Any) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    with pytest.raises(ArgumentError), tracker.step(indices):
        backward(model, FIRST)


@pytest.mark.parametrize(
    "indices", [np.arange(BATCH), range(BATCH), [*np.arange(BATCH)], FIRST.int(), FIRST.byte()]
)
def test_whole_numbers_of_any_kind_are_indices(indices: Any) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    with tracker.step(indices):
        backward(model, FIRST)
    assert tracker.stream.epoch.visits.tolist() == [1] * BATCH + [0] * (NUM_DATA - BATCH)


def test_validation_data_must_fit_the_model() -> None:
    model, optimizer = build()
    backward(model, FIRST)
    optimizer.step()
    x, y = data()
    tracker = engram.Tracker(model, optimizer, data(), validation=(x[:, :3], y))
    with pytest.raises(EngineError, match="a model that runs on the validation data"):
        tracker.update()


def test_another_type_in_the_middle_of_an_epoch_is_named() -> None:
    model, optimizer = build()
    tracker, (x, y) = engram.Tracker(model, optimizer, data()), data()
    with tracker.step(FIRST):
        backward(model, FIRST)
    optimizer.step()
    model.float()
    expected = pytest.raises(ModelMismatchError, match=r"0\.bias, 0\.weight.*another type")
    with expected, tracker.step(FIRST + BATCH):
        functional.cross_entropy(model(x[8:16].float()), y[8:16]).backward()
