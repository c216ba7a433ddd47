"""certify: the truth is inside, at a minimum, by a replay and by a loop; and what is said of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, StorageError, TrainingError
from engram.evidence.ways import ANEW, GOING_ON, MINIMUM, REPLAY
from recorded_training import fit, net, recorded
from retraining_problems import PRIOR_PRECISION, RIDGE, ridge_fit, ridge_problem, ridge_without
from snapshot import differences, snapshot

NUMBER = 30


@pytest.fixture(scope="module")
def ridge():
    """A ridge regression, a rough estimate of it, and its true leave-one-out losses."""
    model, x, y = ridge_problem(NUMBER)
    posterior = engram.laplace(
        model, (x, y), likelihood=RIDGE, structure="full", prior_precision=PRIOR_PRECISION
    )
    rough = engram.sensitivities(model, (x, y), posterior, estimator="linear", progress=False)
    without = [x[i] @ ridge_without(x, y, [i]) for i in range(NUMBER)]
    outputs = torch.stack(without)
    return model, (x, y), rough, RIDGE.loss(outputs, RIDGE.prepare(outputs, y))


@pytest.fixture(scope="module")
def stopped():
    model, data, training = recorded()
    posterior = engram.laplace(model, data, training=training, progress=False)
    return model, data, training, engram.sensitivities(model, data, posterior, progress=False)


def test_the_truth_is_inside_and_the_interval_narrow(ridge):
    model, data, rough, true = ridge
    found = engram.certify(model, data, rough, refits=16, progress=False)
    low, high = found.interval
    assert low < float(true.mean()) < high
    assert found.loo_nll == found.loss.value
    assert found.estimated_loss == rough.loo_nll < low
    assert high - low < 0.3 * float(true.std())  # of 16 at random: 1.07
    assert found.accuracy is None
    assert found.way == MINIMUM
    assert found.worth > 16
    assert torch.allclose(found.truth.loo_loss, true[found.truth.indices], rtol=1e-3)
    assert found.trainings == len(found.positions.unique()) <= found.refits == 16


def test_a_wrong_estimate_only_costs_width(ridge):
    model, data, rough, true = ridge
    wrong = replace(rough, loo_loss=rough.loo_loss.flip(0) + 1.0)
    found = engram.certify(model, data, wrong, refits=24, progress=False)
    right = engram.certify(model, data, rough, refits=24, progress=False)
    assert found.interval[0] < float(true.mean()) < found.interval[1]
    assert found.interval[1] - found.interval[0] > 3 * (right.interval[1] - right.interval[0])
    assert any("hardly ranks" in note for note in found.notes())
    assert right.notes() == []


def test_all_draws_exact_is_the_truth_itself(ridge):
    model, data, rough, true = ridge
    exact = replace(rough, loo_loss=true)
    found = engram.certify(model, data, exact, train=solved, refits=8, progress=False)
    assert found.loo_nll == pytest.approx(float(true.mean()))
    assert found.interval == pytest.approx((found.loo_nll, found.loo_nll))


def solved(model, data):
    with torch.no_grad():
        model.weight.copy_(ridge_fit(*data).T)


def test_the_same_seed_draws_the_same(ridge):
    model, data, rough, _ = ridge
    one, two = (engram.certify(model, data, rough, train=solved, refits=8, seed=3) for _ in "ab")
    assert torch.equal(one.positions, two.positions)
    assert one.interval == two.interval


def test_rows_that_stand_for_nothing_are_not_drawn(ridge):
    model, data, rough, true = ridge
    counts = torch.ones(NUMBER).double()
    counts[true.topk(5).indices] = 0
    some = replace(rough, counts=counts, loo_loss=true)
    found = engram.certify(model, data, some, train=solved, refits=8, progress=False)
    assert bool((counts[found.truth.indices] > 0).all())
    assert found.loo_nll == pytest.approx(float(true[counts > 0].mean()))


def test_estimates_that_are_lost_are_no_obstacle(ridge):
    model, data, rough, true = ridge
    lost = rough.loo_loss.clone()
    lost[3] = float("nan")
    flagged = rough.flagged.clone()
    flagged[3] = True
    found = engram.certify(
        model, data, replace(rough, loo_loss=lost, flagged=flagged), refits=16, progress=False
    )
    assert found.interval[0] < float(true.mean()) < found.interval[1]


def test_a_stopped_net_by_its_record(stopped, tmp_path):
    model, data, training, result = stopped
    losses, hits = [], []
    for i in range(len(data[1])):
        again = engram.replay(model, data, training, [i], progress=False)
        with torch.no_grad():
            outputs = again(data[0][i : i + 1])
        losses.append(nn.functional.cross_entropy(outputs, data[1][i : i + 1]))
        hits.append(outputs.argmax(1) == data[1][i])
    before = snapshot(model)
    found = engram.certify(model, data, result, train=training, refits=16, seed=1, progress=False)
    assert not differences(before, snapshot(model))
    assert found.way == REPLAY
    assert found.interval[0] < float(torch.stack(losses).mean()) < found.interval[1]
    accuracy = float(torch.cat(hits).double().mean())
    assert found.accuracy.low <= accuracy <= found.accuracy.high
    assert found.refit_train_loss == pytest.approx(found.train_loss)
    assert found.notes() == []
    again = engram.load(found.save(tmp_path / "certificate"))
    assert repr(again) == repr(found)
    assert again.interval == found.interval
    assert found.to_frame()["draws"].sum() == 16
    assert "the recorded training walked again" in repr(found)


def test_a_stopped_net_by_a_loop_is_about_its_seed(stopped):
    model, data, _, result = stopped
    anew = engram.recipes.FromStart(fit, net)
    found = engram.certify(model, data, result, train=anew, refits=8, progress=False)
    assert found.way == ANEW
    assert found.refit_train_loss != found.train_loss
    going_on = engram.certify(model, data, result, train=fit, refits=8, progress=False)
    assert going_on.way == GOING_ON
    assert any("had seen the example" in note for note in going_on.notes())


def test_one_logit_has_two_classes():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator).double()
    y = (x.sum(1, keepdim=True) + torch.randn(40, 1, generator=generator) > 0).double()
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        value = value + 0.5 * sum((p**2).sum() for p in model.parameters())
        value.backward()
        return value

    optimizer.step(closure)
    settings = {"likelihood": "bernoulli", "prior_precision": 1.0}
    posterior = engram.laplace(model, (x, y), **settings)
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    found = engram.certify(model, (x, y), result, refits=16, progress=False)
    truth = engram.retrain(model, (x, y), progress=False, **settings)
    hits = ((truth.outputs + truth.deviation > 0) == (y > 0)).double().mean()
    assert found.interval[0] < float(truth.loo_loss.mean()) < found.interval[1]
    assert found.accuracy.low <= float(hits) <= found.accuracy.high


def test_a_net_that_was_stopped_needs_a_way(stopped):
    model, data, _, result = stopped
    with pytest.raises(ArgumentError, match=r"not at a minimum; got none.*train=training"):
        engram.certify(model, data, result)


def test_a_training_that_is_not_deterministic_is_said_and_not_refused(ridge):
    model, data, rough, _ = ridge
    outside = random.Random(1)  # not reset by any seed

    def noisy(own, rest):
        solved(own, rest)
        with torch.no_grad():
            own.weight.add_(outside.gauss(0, 0.1))

    found = engram.certify(model, data, rough, train=noisy, refits=8, progress=False)
    assert any("not decided by its seed" in note for note in found.notes())
    assert "not decided by its seed" in " ".join(repr(found).split())


def nothing(model, data):
    return None


def changing(model, data):
    data[0].mul_(2.0)


@pytest.mark.parametrize(
    ("train", "words"),
    [(nothing, "None, with all weights as before"), (changing, "data that changed during")],
)
def test_functions_that_misbehave(ridge, train, words):
    model, data, rough, _ = ridge
    with pytest.raises(TrainingError, match=words):
        engram.certify(model, data, rough, train=train, refits=8, progress=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"refits": 7}, "at least 2 refits for each of 4 strata, 8 in all; got 7"),
        ({"refits": 0}, "number of refits"),
        ({"strata": 0}, "number of strata"),
        ({"train": "magic"}, "train to be one of sgd"),
    ],
)
def test_wrong_arguments(ridge, settings, words):
    model, data, rough, _ = ridge
    with pytest.raises(ArgumentError, match=words):
        engram.certify(model, data, rough, progress=False, **settings)


def test_a_file_of_another_version(ridge, tmp_path):
    model, data, rough, _ = ridge
    found = engram.certify(model, data, rough, train=solved, refits=8, progress=False)
    file = found.save(tmp_path) / "certificate.json"
    content = json.loads(file.read_text())
    key = next(name for name, value in content.items() if "version" in name or "format" in name)
    content[key] = 99
    file.write_text(json.dumps(content))
    with pytest.raises(StorageError, match="99"):
        engram.load(tmp_path)
