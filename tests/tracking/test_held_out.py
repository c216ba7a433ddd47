"""The estimate from examples that a twin of the training leaves out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.nn import functional

import engram
from engram.errors import ArgumentError, DataError
from engram.evidence.regression_estimator import increase_of_all


def digits(start: int, stop: int) -> tuple[Tensor, Tensor]:
    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    return x[start:stop], torch.tensor(found.target)[start:stop]


def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A fifth of the labels is drawn at random."""
    return x, torch.where(torch.rand(len(y)) < 0.2, torch.randint(0, 10, y.shape), y)


def setting() -> tuple[nn.Module, optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    return model, optimizer, digits(0, 60)


def epochs(model: nn.Module, optimizer: optim.Optimizer, tracker: engram.Tracker, num: int) -> None:
    x, y = digits(0, 60)
    for _ in range(num):
        optimizer.zero_grad()
        with tracker.twin_step(torch.arange(60), y):
            functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        tracker.update()


def test_a_net_that_learns_by_heart() -> None:
    """Labels that are noise in part: the test loss turns, and so does the estimate."""
    torch.manual_seed(0)
    (x, y), test = noisy(*digits(0, 400)), noisy(*digits(400, 1700))
    model = nn.Sequential(nn.Linear(64, 60), nn.Tanh(), nn.Linear(60, 10))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    tracker = engram.Tracker(model, optimizer, (x, y), held_out=100, validation=test)
    for epoch in range(30):
        for batch in torch.randperm(400).split(50):
            optimizer.zero_grad()
            with tracker.twin_step(batch, y[batch]):
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if epoch % 2:
            tracker.update(step=epoch)
    frame = tracker.history.to_frame()
    truth, estimate = frame["validation"], frame["estimate"]
    assert truth.iloc[-1] > 1.2 * truth.min()
    assert truth.loc[tracker.best_step] < 1.05 * truth.min()
    assert float((estimate / truth - 1).abs().mean()) < 0.15
    assert frame["train"].iloc[-1] < 0.5 * truth.min()


def test_the_mean_over_all_data_is_a_regression_on_the_difficulty() -> None:
    generator = torch.Generator().manual_seed(0)
    difficulty = torch.rand(30, generator=generator, dtype=torch.float64)
    increase = torch.rand(30, generator=generator, dtype=torch.float64) * difficulty
    line = np.polyfit(difficulty.numpy(), increase.numpy(), 1)
    expected = float(np.polyval(line, 0.7))
    assert increase_of_all(increase, difficulty, 0.7) == pytest.approx(expected)
    assert increase_of_all(increase[:1], difficulty[:1], 0.7) == pytest.approx(float(increase[0]))


def test_the_estimate_by_hand() -> None:
    model, optimizer, (x, y) = setting()
    tracker = engram.Tracker(model, optimizer, (x, y), held_out=20)
    assert tracker.held_out is not None
    chosen, losses = tracker.held_out.indices, []
    for _ in range(3):
        epochs(model, optimizer, tracker, 1)
        with torch.no_grad():
            losses.append(functional.cross_entropy(model(x), y, reduction="none").double())
    with torch.no_grad():
        weights = tracker.held_out.twin.weights
        left_out = torch.func.functional_call(model, weights, (x[chosen],))
    increase = functional.cross_entropy(left_out, y[chosen], reduction="none") - losses[-1][chosen]
    difficulty = torch.stack(losses).mean(0)
    line = np.polyfit(difficulty[chosen].numpy(), increase.numpy(), 1)
    expected = float(losses[-1].mean() + np.polyval(line, difficulty.mean()))
    last = tracker.history.records[-1]
    assert last.estimate == pytest.approx(expected, rel=1e-5)
    assert last.estimate > last.train


def test_an_update_changes_nothing() -> None:
    model, optimizer, data = setting()
    tracker = engram.Tracker(model, optimizer, data, held_out=30)
    epochs(model, optimizer, tracker, 2)
    assert tracker.held_out is not None
    twin = tracker.held_out.twin
    before = {n: v.detach().clone() for n, v in (twin.weights | trained(model)).items()}
    result = tracker.update()
    assert result is not None
    after = twin.weights | trained(model)
    assert all(value.equal(after[name]) for name, value in before.items())
    assert tracker.history.records[-1].estimate != pytest.approx(result.loo_nll, rel=1e-3)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": p for name, p in model.named_parameters()}


@pytest.mark.parametrize("way", ["state", "folder"])
def test_goes_on_after_a_restart(tmp_path: Path, way: str) -> None:
    model, optimizer, data = setting()
    tracker = engram.Tracker(model, optimizer, data, held_out=20)
    epochs(model, optimizer, tracker, 2)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**kept, "tracker": tracker.state_dict()}, tmp_path / "checkpoint.pt")
    tracker.save(tmp_path / "tracker")
    epochs(model, optimizer, tracker, 2)
    found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model, optimizer, data = setting()
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    again = engram.Tracker(model, optimizer, data, held_out=20)
    if way == "state":
        again.load_state_dict(found["tracker"])
    else:
        again.resume(tmp_path / "tracker")
    epochs(model, optimizer, again, 2)
    expected = [record.estimate for record in tracker.history]
    assert [record.estimate for record in again.history] == expected
    other = engram.Tracker(model, optimizer, data, held_out=30)
    with pytest.raises(DataError, match="a state with 30 held-out examples"):
        other.load_state_dict(found["tracker"])


def test_a_state_is_a_copy_and_fits_its_model_only() -> None:
    model, optimizer, data = setting()
    tracker = engram.Tracker(model, optimizer, data, held_out=20)
    epochs(model, optimizer, tracker, 1)
    state = tracker.state_dict()["held_out"]
    saved = state["twin"]["weights"]["0.weight"].clone()
    epochs(model, optimizer, tracker, 1)
    assert state["twin"]["weights"]["0.weight"].equal(saved)
    wide = nn.Sequential(nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 10))
    other = engram.Tracker(wide, optim.AdamW(wide.parameters()), data, held_out=20)
    assert other.held_out is not None
    with pytest.raises(DataError, match="weights of the model in training"):
        other.held_out.load_state_dict(state)


def test_a_lost_training_is_recorded() -> None:
    model, optimizer, data = setting()
    tracker = engram.Tracker(model, optimizer, data, held_out=20)
    epochs(model, optimizer, tracker, 1)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan  # type: ignore[index]
    epochs(model, optimizer, tracker, 1)
    assert math.isnan(tracker.history.records[-1].estimate)


def test_streamed_epochs_have_it_too() -> None:
    model, optimizer, (x, y) = setting()
    tracker = engram.Tracker(model, optimizer, (x, y), held_out=20)
    for some in torch.arange(120).remainder(60).split(20):
        optimizer.zero_grad()
        with tracker.step(some, y[some]):
            functional.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    assert len(tracker.history) == 2
    assert tracker.held_out is not None
    assert tracker.held_out.twin.missed == 0
    last, epoch = tracker.history.records[-1], tracker.last_epoch
    assert epoch is not None
    assert last.estimate != pytest.approx(epoch.loo_nll, rel=1e-6)


def test_steps_that_the_twin_was_not_told_of() -> None:
    model, optimizer, (x, y) = setting()
    tracker = engram.Tracker(model, optimizer, (x, y), held_out=20)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(ArgumentError, match="got 1 outside"):
        tracker.update()
    with pytest.raises(ArgumentError, match="a tracker with a held-out twin"):
        engram.Tracker(model, optimizer, (x, y)).twin_step(torch.arange(60))


@pytest.mark.parametrize("count", [0, 31, True, 2.5])
def test_counts_that_mean_nothing(count: int) -> None:
    model, optimizer, data = setting()
    with pytest.raises(ArgumentError, match=r"from 1 to 30; .*half of the data"):
        engram.Tracker(model, optimizer, data, held_out=count)
