"""The tracker beside a training loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.errors import ArgumentError, DataError, EngramError
from engram.tracking.history import Record


def data(seed: int = 0, num_data: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data, 4, generator=generator)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def setting() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.step()


def test_update_is_the_estimate_of_the_moment() -> None:
    model, optimizer = setting()
    given = {"posterior": "optimizer", "validation": data(1)}
    tracker = engram.Tracker(model, optimizer, data(), **given)
    for epoch in range(4):
        train_step(model, optimizer)
        result = tracker.update(step=10 * epoch)
    posterior = engram.posterior_of(optimizer, model, num_data=40)
    expected = engram.sensitivities(model, data(), posterior, estimator="linear", progress=False)
    assert result is not None
    assert result.loo_loss.equal(expected.loo_loss)
    with torch.no_grad():
        validation = float(nn.functional.cross_entropy(model(data(1)[0]), data(1)[1]))
    frame = tracker.history.to_frame()
    assert list(frame.index) == [0, 10, 20, 30]
    assert frame["estimate"].iloc[-1] == pytest.approx(expected.loo_nll)
    assert frame["validation"].iloc[-1] == pytest.approx(validation, rel=1e-5)
    assert tracker.history.score_matrix().shape == (4, 40)
    assert tracker.history.score_matrix()[-1].equal(expected.score)


def test_stops_when_the_estimate_has_not_improved() -> None:
    model, optimizer = setting()
    tracker = engram.Tracker(model, optimizer, data(), patience=2)
    assert not tracker.should_stop
    assert tracker.best_step is None
    for step, estimate in enumerate([3.0, 1.0, 2.0]):
        tracker.history.add(Record(step, 0.5, estimate), torch.zeros(40))
    assert not tracker.should_stop
    tracker.history.add(Record(3, 0.5, math.nan), torch.full((40,), math.nan))
    assert not tracker.should_stop  # nothing is known of that update, so that it decides nothing
    assert tracker.stop_reason is None
    tracker.history.add(Record(4, math.nan, math.nan), torch.full((40,), math.nan))
    assert tracker.should_stop
    assert tracker.stop_reason == (
        "no lower estimate than 1 nats at step 1 in 2 updates, 1 of which had diverged"
    )
    assert tracker.best_step == 1


def test_a_training_that_only_diverged_stops_and_says_why() -> None:
    model, optimizer = setting()
    tracker = engram.Tracker(model, optimizer, data(), patience=2)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    tracker.update()
    assert not tracker.should_stop
    tracker.update()
    assert tracker.should_stop
    assert tracker.stop_reason == "no lower estimate in 2 updates, 2 of which had diverged"
    assert [record.examples for record in tracker.history] == [0, 0]


def test_a_loss_that_is_not_finite_is_recorded_and_training_goes_on() -> None:
    model, optimizer = setting()
    tracker = engram.Tracker(model, optimizer, data())
    train_step(model, optimizer)
    assert tracker.update() is not None
    good = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    before = model[0].weight.detach().clone()
    assert tracker.update() is None
    assert torch.equal(model[0].weight.isnan(), before.isnan())
    with torch.no_grad():
        model[0].weight.copy_(good)
    assert tracker.update() is not None
    assert [record.finite for record in tracker.history] == [True, False, True]


def test_history_goes_on_after_a_restart(tmp_path: Path) -> None:
    model, optimizer = setting()
    tracker = engram.Tracker(model, optimizer, data())
    for _ in range(2):
        train_step(model, optimizer)
        tracker.update()
    tracker.save(tmp_path)
    again = engram.Tracker(model, optimizer, data())
    again.resume(tmp_path)
    train_step(model, optimizer)
    again.update()
    assert len(again.history) == 3
    assert again.history.to_frame()["estimate"].iloc[:2].tolist() == pytest.approx(
        tracker.history.to_frame()["estimate"].tolist()
    )
    assert again.history.score_matrix()[:2].equal(tracker.history.score_matrix())


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_curvature_can_be_fitted_at_every_update(structure: str) -> None:
    model, _ = setting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = engram.Tracker(model, optimizer, data(), posterior=structure, prior_precision=0.5)
    train_step(model, optimizer)
    result = tracker.update()
    posterior = engram.laplace(
        model, data(), structure=structure, prior_precision=0.5, progress=False
    )
    expected = engram.sensitivities(model, data(), posterior, progress=False)
    assert result is not None
    assert result.loo_loss.equal(expected.loo_loss)


def test_figures_show_the_history() -> None:
    model, optimizer = setting()
    tracker = engram.Tracker(model, optimizer, data(), posterior="optimizer", validation=data(1))
    with pytest.raises(DataError, match="update"):
        tracker.history.figure()
    for _ in range(3):
        train_step(model, optimizer)
        tracker.update()
    lines = tracker.history.figure().axes[0].get_lines()
    labels = [line.get_label() for line in lines]
    assert {"training", "validation", "estimate"} <= set(labels)
    assert len(tracker.history.score_figure(groups=10).axes[0].get_lines()) == 3
    chosen = tracker.history.score_figure(groups=4, steps=[1, 0]).axes[0].get_lines()
    assert [line.get_label() for line in chosen] == ["step 0", "step 1"]
    matrix = tracker.history.score_matrix()
    sorted_by_last = matrix[0][matrix[1].argsort()].tensor_split(4)
    expected = [float(part.double().mean()) for part in sorted_by_last]
    assert list(chosen[0].get_ydata()) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ArgumentError, match=r"steps of updates, from 0, 1, 2.*7"):
        tracker.history.score_figure(steps=[0, 7])


def test_bad_settings_say_what_to_do(tmp_path: Path) -> None:
    model, optimizer = setting()
    with pytest.raises(ArgumentError, match="one of auto, optimizer"):
        engram.Tracker(model, optimizer, data(), posterior="hessian")
    with pytest.raises(ArgumentError, match="prior_precision"):
        engram.Tracker(model, optimizer, data(), posterior="kronecker", average=0.9)
    with pytest.raises(ArgumentError, match="patience"):
        engram.Tracker(model, optimizer, data(), patience=0)
    with pytest.raises(DataError, match=r"history\.json"):
        engram.load(tmp_path)


class Unknown(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": Unknown}, "Unknown"),
        ({"optimizer": lambda p: torch.optim.Adam([nn.Parameter(torch.ones(1))])}, "none of them"),
        ({"optimizer": torch.optim.Adam}, "positive weight decay"),
        ({"reduction": "sum"}, "batch_size"),
        ({"prior_precision": -1.0}, "positive prior_precision"),
        ({"prior_precision": -1.0, "posterior": "kronecker"}, "positive prior_precision"),
        ({"second_moment": "both"}, "second_moment"),
        ({"second_moment": "example"}, "batch_size"),
        ({"estimator": "exact"}, "exact"),
        ({"samples": -1}, "samples"),
        ({"samples": 0.5}, "samples"),
        ({"patience": 1.5}, "patience"),
        ({"validation": DataLoader(TensorDataset(*data()), shuffle=True)}, "in order"),
    ],
)
def test_bad_settings_are_found_before_training(settings: dict[str, Any], message: str) -> None:
    model, optimizer = setting()
    given = dict(settings)
    if "optimizer" in given:
        optimizer = given.pop("optimizer")(model.parameters())
    with pytest.raises(EngramError, match=message):
        engram.Tracker(model, optimizer, data(), **given)


def test_a_compiled_model_is_the_model_inside() -> None:
    model, optimizer = setting()
    train_step(model, optimizer)
    compiled = torch.compile(model, backend="eager")
    expected = engram.Tracker(model, optimizer, data(), posterior="optimizer").update()
    found = engram.Tracker(compiled, optimizer, data(), posterior="optimizer").update()
    assert expected is not None
    assert found is not None
    assert found.loo_loss.equal(expected.loo_loss)
    posterior = engram.posterior_of(optimizer, compiled, num_data=40)
    again = engram.sensitivities(compiled, data(), posterior, progress=False)
    assert again.loo_loss.equal(expected.loo_loss)


class Named(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


def test_outputs_may_come_in_a_dict() -> None:
    model, optimizer = setting()
    train_step(model, optimizer)
    read = {"posterior": "optimizer"}
    expected = engram.Tracker(model, optimizer, data(), **read).update()
    wrapped = Named(model)
    tracker = engram.Tracker(wrapped, optimizer, data(), **read)
    found = tracker.update()
    assert expected is not None
    assert found is not None
    assert torch.allclose(found.loo_loss, expected.loo_loss)
    x, y = data()
    with tracker.step(torch.arange(len(x))):
        nn.functional.cross_entropy(wrapped(x)["logits"], y).backward()
    assert torch.allclose(tracker.last_epoch.loo_loss, expected.loo_loss.float(), rtol=1e-4)


def test_a_history_without_finite_updates_says_so() -> None:
    model, optimizer = setting()
    tracker = engram.Tracker(model, optimizer, data())
    assert "0 updates)" in repr(tracker)
    train_step(model, optimizer)
    state = tracker.state_dict()
    tracker.update(step=4)
    assert "1 update, lowest estimate" in repr(tracker)
    tracker.load_state_dict(state)
    assert tracker.last_epoch is None
    with pytest.raises(DataError, match="without history"):
        tracker.load_state_dict({})
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    tracker.update()
    assert "none of them finite" in repr(tracker.history)
    with pytest.raises(DataError, match="diverged"):
        tracker.history.figure()
    with pytest.raises(DataError, match="diverged"):
        tracker.report("nowhere.html")
