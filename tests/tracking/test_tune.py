"""tune against ridge regression refitted without each example, and on nets."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, NonFiniteError, StorageError, TrainingError
from interrupting import condition, moments, surroundings, watched
from saved_folders import edit
from snapshot import snapshot

GRID = [0.01, 0.1, 1.0, 10.0, 100.0]


@pytest.fixture
def regression() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(40, 12, dtype=torch.float64)
    return inputs, inputs[:, :2].sum(1, keepdim=True) + torch.randn(40, 1, dtype=torch.float64)


def ridge(data: tuple[Tensor, Tensor]):
    inputs, targets = data

    def train(model: nn.Linear, delta: float) -> None:
        matrix = inputs.mT @ inputs + delta * torch.eye(inputs.shape[1])
        model.weight.data.copy_(torch.linalg.solve(matrix, inputs.mT @ targets).mT)

    return train


def test_ridge_has_the_leave_one_out_errors_of_scikit_learn(regression) -> None:
    model = nn.Linear(12, 1, bias=False).double()
    tuning = engram.tune(
        model,
        regression,
        ridge(regression),
        GRID,
        likelihood="gaussian",
        posterior="full",
        estimator="corrected",
    )
    inputs, targets = (tensor.numpy() for tensor in regression)
    chosen = RidgeCV(GRID, fit_intercept=False, store_cv_results=True).fit(inputs, targets[:, 0])
    squares = chosen.cv_results_.reshape(len(targets), -1).mean(0)
    expected = squares / 2 + math.log(2 * math.pi) / 2
    offset = tuning.to_frame()["estimate"].to_numpy() - expected
    np.testing.assert_allclose(offset, offset[0], atol=1e-10)  # a constant of the density aside
    assert tuning.prior_precision == chosen.alpha_
    assert not tuning.at_edge


def test_a_tuning_is_read_as_it_was(regression, tmp_path: Path) -> None:
    options = {"likelihood": "gaussian", "posterior": "full"}
    model = nn.Linear(12, 1, bias=False).double()
    tuning = engram.tune(model, regression, ridge(regression), GRID, **options)
    read = engram.load(tuning.save(tmp_path))
    assert repr(read) == repr(tuning)
    assert read.to_frame().equals(tuning.to_frame())
    assert read.at_edge == tuning.at_edge
    assert read.model is None
    model.load_state_dict(read.state)
    assert torch.equal(model.weight, tuning.model.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("trials"),
        lambda content: content["trials"].clear(),
        lambda content: content["trials"][0].update(estimate=None),
        lambda content: content["best"].update(prior_precision=7.0),
        lambda content: content["best"].pop("verdict"),
        lambda content: content.update(state=[]),
        lambda content: content["state"].update(weight=3.0),
    ],
)
def test_a_wrong_tuning_is_refused(regression, tmp_path: Path, change) -> None:
    options = {"likelihood": "gaussian", "posterior": "full"}
    model = nn.Linear(12, 1, bias=False).double()
    path = engram.tune(model, regression, ridge(regression), GRID, **options).save(tmp_path)
    edit(path, "tuning", change)
    with pytest.raises(StorageError):
        engram.load(path)


def classification(count: int = 60) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    inputs = torch.randn(count, 4)
    return inputs, (inputs[:, 0] + 0.5 * torch.randn(count) > 0).long()


def by_adam(data: tuple[Tensor, Tensor], starts: list[Tensor]):
    inputs, targets = data

    def train(model: nn.Module, delta: float) -> torch.optim.Optimizer:
        starts.append(next(model.parameters()).detach().clone())
        optimizer = torch.optim.Adam(model.parameters(), 0.05, weight_decay=delta / len(targets))
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return optimizer

    return train


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_trainings_start_from_the_one_before_and_the_model_stays() -> None:
    data, held_out, model, starts = classification(), classification(20), net(), []
    before = snapshot(model)
    train = by_adam(data, starts)
    tuning = engram.tune(model, data, train, [0.1, 10.0, 1.0], validation=held_out)
    assert snapshot(model) == before
    assert torch.equal(starts[0], model[0].weight)
    assert not torch.equal(starts[1], starts[0])
    frame = tuning.to_frame()
    assert list(frame.index) == [0.1, 1.0, 10.0]
    assert frame.notna().all(axis=None)
    assert frame["estimate"].idxmin() == tuning.prior_precision
    assert set(frame["verdict"]) <= {"good", "caution", "unreliable"}
    posterior = engram.laplace(
        tuning.model, data, structure="kronecker", prior_precision=tuning.prior_precision
    )
    again = engram.sensitivities(tuning.model, data, posterior)
    assert again.loo_nll == pytest.approx(tuning.best.estimate, rel=1e-6)
    assert tuning.figure().axes[0].get_xscale() == "log"


def test_every_training_can_start_from_the_model() -> None:
    data, starts = classification(), []
    model = net()
    engram.tune(model, data, by_adam(data, starts), [0.1, 1.0, 10.0], warm_start=False)
    first = next(iter(model.parameters())).detach()
    assert len(starts) == 3
    assert all(torch.equal(start, first) for start in starts)
    with pytest.raises(ArgumentError, match="warm_start"):
        engram.tune(model, data, by_adam(data, []), [1.0], warm_start="no")


def test_the_posterior_can_come_from_the_optimizer() -> None:
    data = classification()
    tuning = engram.tune(net(), data, by_adam(data, []), [0.1, 1.0], posterior="optimizer")
    assert tuning.to_frame()["estimate"].notna().all()
    with pytest.raises(ArgumentError, match="return the optimizer"):
        engram.tune(net(), data, lambda model, delta: None, [1.0], posterior="optimizer")


def test_a_diverged_training_is_recorded_and_not_built_upon() -> None:
    data, starts = classification(), []
    trained = by_adam(data, starts)

    def train(model: nn.Module, delta: float) -> None:
        trained(model, delta)
        if delta == 1.0:
            model[0].weight.data.fill_(math.nan)

    tuning = engram.tune(net(), data, train, [0.1, 1.0, 10.0])
    assert math.isnan(tuning.trials[1].estimate)
    assert all(start.isfinite().all() for start in starts)
    assert tuning.prior_precision != 1.0

    def lost(model: nn.Module, delta: float) -> None:
        model[0].weight.data.fill_(math.nan)

    with pytest.raises(NonFiniteError, match="at all 2"):
        engram.tune(net(), data, lost, [0.1, 1.0])


@pytest.mark.parametrize("grid", [[], [1.0, 1.0], [-1.0], [math.nan]])
def test_grids_that_make_no_sense(grid: list[float]) -> None:
    with pytest.raises(ArgumentError):
        engram.tune(net(), classification(), lambda model, delta: None, grid)


def test_unknown_posterior() -> None:
    with pytest.raises(ArgumentError, match="kronecker"):
        engram.tune(net(), classification(), lambda model, delta: None, [1.0], posterior="best")


def test_a_returned_model_is_the_trained_one(regression) -> None:
    in_place = ridge(regression)

    def returning(model: nn.Linear, delta: float) -> nn.Module:
        fresh = nn.Linear(12, 1, bias=False).double()
        in_place(fresh, delta)
        return fresh

    model = nn.Linear(12, 1, bias=False).double()
    settings = {"likelihood": "gaussian", "posterior": "full", "estimator": "corrected"}
    first, second = (
        engram.tune(model, regression, train, GRID, **settings) for train in (in_place, returning)
    )
    assert first.to_frame().equals(second.to_frame())
    assert torch.equal(first.model.weight, second.model.weight)


def another(model: nn.Module, delta: float) -> nn.Module:
    return nn.Linear(4, 2)


def single(model: nn.Module, delta: float) -> nn.Module:
    return model.double()


def forgetful(model: nn.Module, delta: float) -> None:
    fresh = net()
    fresh[0].weight.data.mul_(2.0)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (another, "same parameters"),
        (single, "float64.*in place of"),
        (lambda model, delta: {"loss": 0.3}, "got dict"),
        (forgetful, "all weights as before at two strengths"),
    ],
    ids=["another model", "another type", "a dict", "nothing"],
)
def test_unusable_training(train, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        engram.tune(net(), classification(), train, [0.1, 1.0])


def test_data_changed_by_the_training_is_noticed() -> None:
    data = classification()

    def train(model: nn.Module, delta: float) -> None:
        data[0].mul_(2.0)
        model[0].weight.data.mul_(0.9)

    with pytest.raises(TrainingError, match="data that changed"):
        engram.tune(net(), data, train, [0.1, 1.0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_everything_as_it_was() -> None:
    data, model = classification(12), net()

    def call() -> None:
        with torch.no_grad():
            engram.tune(model, data, by_adam(data, []), [0.1], posterior="diagonal", progress=False)

    before, weights = surroundings(), condition(model)
    for moment in moments(call, 6, 6):
        watched(call, moment)
        assert surroundings() == before, moment
        assert condition(model) == weights, moment
