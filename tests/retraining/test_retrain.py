"""Retraining against closed forms and plain loops of separate trainings."""

import copy
import dataclasses
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.retraining.recipes import LBFGS, SGD, Adam, Newton
from retraining_problems import (
    PRIOR_PRECISION,
    RIDGE,
    classifier,
    cosine,
    minimised,
    ridge_fit,
    ridge_problem,
    ridge_without,
)
from snapshot import differences, snapshot

DELTA = 0.5


def ridge_retrain(model, x, y, *choice, **settings):
    return engram.retrain(
        model,
        (x, y),
        *choice,
        likelihood=RIDGE,
        prior_precision=PRIOR_PRECISION,
        progress=False,
        **settings,
    )


@pytest.mark.parametrize(
    "train", [Newton(relative_gradient=1e-9), LBFGS(relative_gradient=1e-9)], ids=type
)
def test_leaving_one_out_equals_the_closed_form(train):
    model, x, y = ridge_problem()
    truth = ridge_retrain(model, x, y, train=train, keep_models=True, evaluate_on=(x, y))
    for i in range(len(x)):
        exact = ridge_without(x, y, [i])
        assert (truth.parameters["weight"][i] - exact.T).abs().max() < 1e-8
        assert (truth.outputs[i] + truth.deviation[i] - x[i] @ exact).abs().max() < 1e-8
        loss = RIDGE.loss(x @ exact, y)
        assert (truth.evaluation_loss[i] - loss).abs().max() < 1e-8
        assert (truth.model(i, model)(x[i]) - x[i] @ exact).abs().max() < 1e-8
    assert (truth.score - truth.prediction_deviation.abs().sum(1)).abs().max() == 0
    assert (truth.loo_loss - RIDGE.loss(truth.outputs + truth.deviation, y)).abs().max() < 1e-12
    assert truth.converged.all()
    assert truth.noise_floor.level < 1e-8


def test_groups_equal_the_closed_form():
    model, x, y = ridge_problem()
    groups = {"first": [0, 5, 9], "second": [3], "third": [2, 4]}
    truth = ridge_retrain(model, x, y, groups=groups, train=Newton(relative_gradient=1e-10))
    assert truth.labels == ("first", "second", "third")
    assert truth.indices.tolist() == [0, 5, 9, 3, 2, 4]
    assert truth.owners.tolist() == [0, 0, 0, 1, 2, 2]
    for row, (index, owner) in enumerate(zip(truth.indices, truth.owners, strict=True)):
        exact = ridge_without(x, y, list(groups.values())[owner])
        without = truth.outputs[row] + truth.deviation[row]
        assert (without - x[index] @ exact).abs().max() < 1e-8
    assert truth.to_frame().columns[0] == "left_out_with"


def test_an_unconverged_model_is_measured_from_its_refit():
    model, x, y = ridge_problem()
    with torch.no_grad():
        model.weight += 0.3
    truth = ridge_retrain(model, x, y, [2, 7], train=Newton(relative_gradient=1e-10))
    assert (truth.outputs - x[[2, 7]] @ ridge_fit(x, y)).abs().max() < 1e-8
    expected = torch.stack([x[i] @ (ridge_without(x, y, [i]) - ridge_fit(x, y)) for i in (2, 7)])
    assert (truth.deviation - expected).abs().max() < 1e-8
    assert truth.noise_floor.drift > 0.1


@pytest.mark.parametrize(
    "train", [Newton(relative_gradient=1e-7), LBFGS(relative_gradient=1e-7)], ids=type
)
def test_a_net_equals_separate_trainings(train):
    model, x, y = classifier()
    minimised(model, x, y, torch.ones(36), DELTA)
    truth = engram.retrain(
        model, (x, y), range(0, 36, 4), train=train, prior_precision=DELTA, progress=False
    )
    for row, index in enumerate(truth.indices.tolist()):
        weights = torch.ones(36)
        weights[index] = 0.0
        separate = minimised(copy.deepcopy(model), x, y, weights, DELTA)
        without = truth.outputs[row] + truth.deviation[row]
        assert (without - separate(x[index : index + 1])[0]).abs().max() < 1e-5
    assert truth.converged.all()


def test_leaving_a_class_out_equals_a_separate_training():
    model, x, y = classifier()
    minimised(model, x, y, torch.ones(36), DELTA)
    truth = engram.retrain(
        model, (x, y), classes=[1], train=Newton(relative_gradient=1e-8), prior_precision=DELTA,
        progress=False, evaluate_on=(x, y),
    )  # fmt: skip
    separate = minimised(copy.deepcopy(model), x, y, (y != 1).double(), DELTA)
    assert truth.indices.tolist() == (y == 1).nonzero()[:, 0].tolist()
    assert (truth.outputs + truth.deviation - separate(x[y == 1])).abs().max() < 1e-5
    loss = nn.functional.cross_entropy(separate(x), y, reduction="none")
    assert (truth.evaluation_loss[0] - loss).abs().max() < 1e-5


def descended(model, x, y, left_out, optimizer_of, rate, epochs, batch_size, final=0.0):
    """One copy by torch's optimizer: the same batches, an example left out by a weight of 0."""
    trained = copy.deepcopy(model)
    optimizer = optimizer_of(trained.parameters())
    weights = torch.ones(len(x))
    weights[left_out] = 0.0
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(x), generator=generator).split(batch_size) for _ in range(epochs)]
    batches = [batch for order in orders for batch in order]
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = final + cosine(rate - final, step, len(batches))
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(trained(x[batch]), y[batch], reduction="none")
        (weights[batch] * losses).mean().backward()
        optimizer.step()
    return trained


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_descent_equals_separate_trainings(name):
    model, x, y = classifier()
    decay, rate = DELTA / len(x), 0.05
    recipe = {
        "sgd": SGD(learning_rate=rate, epochs=4, batch_size=10),
        "adam": Adam(learning_rate=rate, epochs=4, batch_size=10),
    }[name]
    optimizer_of = {
        "sgd": lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9, weight_decay=decay),
        "adam": lambda p: torch.optim.Adam(p, lr=rate, weight_decay=decay),
    }[name]
    truth = engram.retrain(
        model, (x, y), [3, 20], train=recipe, prior_precision=DELTA, progress=False
    )
    baseline = descended(model, x, y, [], optimizer_of, rate, 4, 10)
    for row, index in enumerate([3, 20]):
        separate = descended(model, x, y, [index], optimizer_of, rate, 4, 10)
        own = x[index : index + 1]
        expected = (separate(own) - baseline(own))[0]
        assert (truth.deviation[row] - expected).abs().max() < 1e-9
    assert truth.noise_floor.repeated < 1e-12
    assert truth.noise_floor.reseeded > 0


@pytest.mark.parametrize("final", [0.01, 0.05])
def test_the_cosine_falls_to_the_final_rate(final):
    model, x, y = classifier()
    rate, recipe = 0.05, SGD(0.05, epochs=3, batch_size=10, final_learning_rate=final)
    truth = engram.retrain(model, (x, y), [3], train=recipe, prior_precision=DELTA, progress=False)
    given = (lambda p: torch.optim.SGD(p, rate, 0.9, weight_decay=DELTA / len(x)), rate, 3, 10)
    baseline = descended(model, x, y, [], *given, final)
    separate = descended(model, x, y, [3], *given, final)
    expected = (separate(x[3:4]) - baseline(x[3:4]))[0]
    assert (truth.deviation[0] - expected).abs().max() < 1e-9


@pytest.mark.parametrize("final", [-0.1, 0.2, "low"])
def test_a_final_rate_lies_below_the_first(final):
    with pytest.raises(engram.EngramError, match="final_learning_rate from 0 to the learning"):
        Adam(learning_rate=0.1, final_learning_rate=final)


def closed_form(model, data):
    with torch.no_grad():
        model.weight.copy_(ridge_fit(*data).T)


def test_a_function_gets_a_copy_and_the_remaining_data():
    model, x, y = ridge_problem()
    seen = []

    def fit(own, data):
        assert own is not model
        seen.append(len(data[0]))
        closed_form(own, data)

    truth = ridge_retrain(model, x, y, [1, 4], train=fit)
    assert seen == [14, 14, 14, 13, 13]
    for row, index in enumerate([1, 4]):
        without = truth.outputs[row] + truth.deviation[row]
        assert (without - x[index] @ ridge_without(x, y, [index])).abs().max() < 1e-10
    assert truth.noise_floor.level == 0


def test_a_function_gets_data_in_the_form_it_was_given():
    model, x, y = ridge_problem()
    forms = {
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=5),
    }
    expected = ridge_retrain(model, x, y, [1, 4], train=closed_form)

    def fit(own, data):
        source = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=4)
        rows = list(source)
        closed_form(own, (torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])))
        return own

    for data in forms.values():
        found = engram.retrain(model, data, [1, 4], train=fit, likelihood=RIDGE, progress=False)
        assert (found.deviation - expected.deviation).abs().max() < 1e-12


def test_random_training_is_the_same_for_the_same_seed():
    model, x, y = classifier()

    def fit(own, data):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for _ in range(5):
            chosen = torch.randint(len(data[0]), (8,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(own(data[0][chosen]), data[1][chosen]).backward()
            optimizer.step()

    first = engram.retrain(model, (x, y), [1, 2], train=fit, progress=False, seed=4)
    second = engram.retrain(model, (x, y), [1, 2], train=fit, progress=False, seed=4)
    assert torch.equal(first.deviation, second.deviation)
    assert first.noise_floor.repeated == 0
    assert first.noise_floor.reseeded > 0


def test_what_vmap_cannot_run_is_run_copy_by_copy():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2, bias=False).double()

        def forward(self, x):
            return self.layer(x) if self.layer.weight.sum().item() < 1e9 else x[:, :2]

    reference, x, y = ridge_problem()
    model = Branching()
    model.layer.load_state_dict(reference.state_dict())
    found = ridge_retrain(model, x, y, [0, 6], train=Newton(relative_gradient=1e-9))
    for row, index in enumerate([0, 6]):
        without = found.outputs[row] + found.deviation[row]
        assert (without - x[index] @ ridge_without(x, y, [index])).abs().max() < 1e-8


@pytest.mark.parametrize(
    "train", ["newton", "adam", closed_form], ids=["newton", "adam", "function"]
)
def test_the_callers_model_is_untouched(train):
    model, x, y = ridge_problem()
    model.train()
    model.weight.grad = torch.ones_like(model.weight)
    before, data_before = snapshot(model), x.clone()
    ridge_retrain(model, x, y, [0, 3], train=train)
    assert differences(before, snapshot(model)) == []
    assert torch.equal(x, data_before)


def test_layers_that_differ_in_train_mode_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    _, x, y = classifier(torch.float32)
    model(x)
    model.train()
    before = snapshot(model)
    truth = engram.retrain(model, (x, y), [0, 1], prior_precision=1.0, progress=False)
    assert differences(before, snapshot(model)) == []
    assert truth.in_eval_mode == ("BatchNorm1d", "Dropout")
    assert "BatchNorm1d, Dropout in eval mode" in repr(truth)


def test_saved_and_loaded(tmp_path):
    model, x, y = ridge_problem()
    truth = ridge_retrain(model, x, y, [1, 2, 5], keep_models=True, evaluate_on=(x, y))
    again = engram.load(truth.save(tmp_path / "truth"))
    assert repr(again) == repr(truth)
    assert torch.equal(again.parameters["weight"], truth.parameters["weight"])
    assert again.to_frame().equals(truth.to_frame())
    assert torch.equal(again.evaluation_change, truth.evaluation_change)


def test_a_compiled_model_is_trained_as_it_is():
    model, x, y = ridge_problem()
    wrapped = torch.compile(model)
    plain, compiled = (
        engram.retrain(own, (x, y), [0, 3], train="lbfgs", likelihood=RIDGE, progress=False)
        for own in (model, wrapped)
    )
    assert torch.equal(plain.deviation, compiled.deviation)


def test_a_norm_that_is_no_number_is_not_converged():
    model, x, y = ridge_problem()
    truth = engram.retrain(model, (x, y), [0], likelihood=RIDGE, progress=False)
    unknown = dataclasses.replace(truth, gradient_norm=torch.tensor([math.nan]))
    assert truth.converged.all()
    assert not unknown.converged.any()


def test_kept_models_have_the_buffers_that_a_function_has_trained():
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), torch.randint(0, 2, (12,))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_buffer("chosen", torch.tensor([True, False]))

    def fit(own, data):
        own(data[0])  # batch normalisation learns its statistics
        own[0].weight.data.mul_(0.9)

    truth = engram.retrain(model, (x, y), [2, 5], train=fit, keep_models=True, progress=False)
    for number, index in enumerate([2, 5]):
        again = truth.model(number, model).eval()(x[index : index + 1])
        expected = truth.outputs[number] + truth.deviation[number]
        assert torch.allclose(again[0], expected, atol=1e-6)
    assert truth.parameters["1.running_mean"].shape == (2, 4)


@pytest.mark.parametrize("number", [-1, 2, 0.0, "a", None])
def test_copies_that_do_not_exist(number):
    model, x, y = ridge_problem()
    truth = ridge_retrain(model, x, y, [1, 2], keep_models=True)
    with pytest.raises(engram.errors.ArgumentError, match="from 0 to 1"):
        truth.model(number, model)
    with pytest.raises(engram.errors.ModelMismatchError, match="weight"):
        truth.model(0, nn.Linear(9, 2))


def test_two_threads_train_one_after_the_other():
    model, x, y = classifier()

    def fit(own, data):
        noise = torch.randn(5, 4, dtype=torch.float64)
        time.sleep(0.005)
        own[0].weight.data.add_(0.1 * noise + 0.01 * random.random())

    def run():
        return engram.retrain(model, (x, y), [0, 1], train=fit, progress=False).deviation

    state, expected = torch.get_rng_state(), run()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: run(), range(3)))
    assert all(torch.equal(one, expected) for one in found)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_converged_baseline_no_copy_counts_as_converged(tmp_path):
    model, x, y = classifier()
    hasty = Newton(iterations=8)
    truth = engram.retrain(
        model, (x, y), [0, 9], train=hasty, prior_precision=DELTA, progress=False
    )
    assert (truth.gradient_norm <= truth.wanted_norm).all()  # by themselves they are
    assert not truth.baseline_converged
    assert not truth.converged.any()
    assert "refit with everything, so no copy counts" in repr(truth)
    assert not engram.load(truth.save(tmp_path)).baseline_converged
