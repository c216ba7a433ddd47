"""What a streamed step refuses, and what it only writes down."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError, DataError, EngineError, LikelihoodError
from engram.optimizers import DiagonalOnlineNewton
from streamed import BATCH, NUM_DATA, backward, batches, build, data


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_must_be_reduced_as_announced(reduction: str) -> None:
    model, optimizer = build()
    x, y = data()
    tracker = engram.Tracker(
        model, optimizer, data(), reduction=reduction, training_batch_size=BATCH
    )
    batch = torch.arange(BATCH)
    with tracker.step(batch):
        functional.cross_entropy(model(x[:8]), y[:8], reduction=reduction).backward()
    other = {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(ArgumentError, match=f"the {other} over the batch"), tracker.step(batch):
        functional.cross_entropy(model(x[:8]), y[:8], reduction=other).backward()
    with tracker.step(batch, scale=0.25):
        (functional.cross_entropy(model(x[:8]), y[:8], reduction=reduction) / 4).backward()
    with pytest.raises(DataError, match="belong together"), tracker.step(batch + 8):
        functional.cross_entropy(model(x[:8]), y[:8], reduction=reduction).backward()
    with pytest.raises(LikelihoodError, match="belong together"), tracker.step(batch + 8):
        functional.cross_entropy(model(x[:8] + 0.1), y[:8], reduction=reduction).backward()


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (None, "without indices"),
        ([0, 1, 1], "1 repeated.*without replacement"),
        ([0, NUM_DATA], f"0 to {NUM_DATA - 1}"),
        ([-1, 0], "0 to"),
        ([0.5], "integer indices"),
        ([1j], "integer indices"),
    ],
)
def test_indices_must_name_examples(indices: list[complex] | None, message: str) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    with pytest.raises(ArgumentError, match=message), tracker.step(indices):
        pass


def test_a_step_is_one_forward_and_one_backward_pass() -> None:
    model, optimizer = build()
    tracker, x = engram.Tracker(model, optimizer, data()), data()[0]
    with pytest.raises(EngineError, match="a second one"), tracker.step(torch.arange(8)):
        model(x[:8]) + model(x[:8])
    with pytest.raises(EngineError, match="call of the model"), tracker.step(torch.arange(8)):
        pass
    with pytest.raises(EngineError, match="backward pass"), tracker.step(torch.arange(8)):
        model(x[:8])
    with pytest.raises(EngineError, match="outputs for 8"), tracker.step(torch.arange(7)):
        backward(model, torch.arange(8))


def test_batch_normalisation_in_train_mode_has_no_examples_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = engram.Tracker(model, optimizer, data(), prior_precision=1.0)
    expected = pytest.raises(EngineError, match=r"BatchNorm1d.*tracker\.update")
    with expected, tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))
    model.eval()
    with tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))


def test_a_loss_that_is_not_finite_is_recorded_and_training_goes_on() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    for number, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        if number == 4:
            good = {k: v.clone() for k, v in model.state_dict().items()}
            with torch.no_grad():
                model[0].weight[0, 0] = math.nan
        with tracker.step(batch):
            backward(model, batch)
        if number == 4:
            model.load_state_dict(good)
        else:
            optimizer.step()
    assert [record.finite for record in tracker.history] == [True, False, True]


def test_other_estimators_need_an_update() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), estimator="corrected")
    with pytest.raises(ArgumentError, match="streaming"), tracker.step([0]):
        pass


def test_weights_must_not_move_inside_a_step() -> None:
    for name in ("tanh", "bare parameter"):
        model, optimizer = build(name)
        tracker = engram.Tracker(model, optimizer, data())
        refused = pytest.raises(EngineError, match=r"optimizer\.step\(\) after the block")
        with refused, tracker.step(torch.arange(8)):
            backward(model, torch.arange(8))
            optimizer.step()


@pytest.mark.parametrize("average", [None, 0.5])
def test_a_fit_that_fails_while_streaming_is_recorded(average: float | None) -> None:
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"posterior": "diagonal", "prior_precision": 1.0, "average": average}
    tracker = engram.Tracker(model, optimizer, data(), **settings)
    good = {k: v.clone() for k, v in model.state_dict().items()}
    for number, batch in enumerate(batches(3)):
        if number == 3:
            with torch.no_grad():
                model[0].weight.fill_(math.nan)
        if number == 6:
            model.load_state_dict(good)
        with tracker.step(batch):
            backward(model, batch)
    assert [record.finite for record in tracker.history] == [True, False, True]
    first, _, last = tracker.history
    assert last.estimate == pytest.approx(first.estimate)
    if tracker.source.averaged is not None:
        assert tracker.source.averaged.updates == 2


def test_other_operations_in_train_mode_are_named_as_the_cause() -> None:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = engram.Tracker(model, optimizer, data(), prior_precision=1.0)
    expected = pytest.raises(EngineError, match=r"train mode as in eval mode.*tracker\.update")
    with expected, tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))
    assert tracker.update() is not None


def test_what_cannot_be_streamed_is_sent_to_update() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), samples=2)
    with pytest.raises(ArgumentError, match="samples=0"), tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))
    own = DiagonalOnlineNewton(model.parameters(), num_data=NUM_DATA, prior_precision=1.0)
    tracker = engram.Tracker(model, own, data())
    with pytest.raises(ArgumentError, match=r"tracker\.update"), tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))
