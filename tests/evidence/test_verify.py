"""verify: the sample, the numbers, the noise, the picture and the sentence."""

import copy
import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, ModelMismatchError, StorageError, TrainingError
from engram.evidence.verify import stratified
from engram.likelihoods import Gaussian
from retraining_problems import classifier, minimised, ridge_fit, ridge_problem

DELTA = 1.0


@pytest.fixture(scope="module")
def digits_like():
    """A converged classifier, its data, and a result that should agree with retraining."""
    model, x, y = classifier()
    minimised(model, x, y, torch.ones(36), DELTA)
    posterior = engram.laplace(
        model, (x, y), structure="full", prior_precision=DELTA, progress=False
    )
    result = engram.sensitivities(
        model, (x, y), posterior, estimator="iterated", rounds=5, progress=False
    )
    return model, (x, y), result


def test_a_good_result_is_said_to_be_good(digits_like, tmp_path):
    model, data, result = digits_like
    check = engram.verify(model, data, result, sample=18, progress=False)
    assert check.score.spearman.value > 0.95
    assert check.score.spearman.low <= check.score.spearman.value <= check.score.spearman.high
    assert "rank the examples as retraining does" in check.sentence
    assert str(check) == check.sentence
    assert check.deterministic
    assert check.noise_share < 0.01
    again = engram.load(check.save(tmp_path / "check"))
    assert repr(again) == repr(check)
    assert len(check.to_frame()) == 18
    figure = check.figure()
    assert len(figure.axes) == 2
    figure.savefig(tmp_path / "check.png")


def test_a_wrong_result_is_said_to_be_wrong(digits_like):
    model, data, result = digits_like
    shuffled = torch.randperm(36, generator=torch.Generator().manual_seed(0))
    wrong = replace(result, score=result.score[shuffled], loo_loss=result.loss + 0.0)
    check = engram.verify(model, data, wrong, sample=18, progress=False)
    assert check.score.spearman.value < 0.7
    assert "do not rank" in check.sentence


def test_noise_is_named():
    model, x, y = ridge_problem(30)
    likelihood = Gaussian()
    posterior = engram.laplace(
        model, (x, y), likelihood=likelihood, structure="full", progress=False, prior_precision=1.0
    )
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    outside = random.Random(1)  # not reset by any seed

    def fit(own, data):
        with torch.no_grad():
            own.weight.copy_(ridge_fit(*data).T).add_(outside.gauss(0, 1))

    check = engram.verify(model, (x, y), result, train=fit, sample=6, progress=False)
    assert not check.deterministic
    assert "not deterministic" in check.sentence
    assert "too noisy" in check.sentence


def nothing(model, data):
    return None


def changing(model, data):
    data[0].mul_(2.0)


@pytest.mark.parametrize(
    ("train", "words"),
    [(nothing, "None, with all weights as before"), (changing, "data that changed during")],
)
def test_functions_that_misbehave(digits_like, train, words):
    model, data, result = digits_like
    before = data[0].clone()
    with pytest.raises(TrainingError, match=words):
        engram.verify(model, data, result, train=train, sample=6, progress=False)
    assert torch.equal(data[0], before)


def test_a_file_of_another_version(digits_like, tmp_path):
    model, data, result = digits_like
    found = engram.verify(model, data, result, sample=6, progress=False)
    file = found.save(tmp_path) / "verification.json"
    content = json.loads(file.read_text())
    content["format"] = 99
    file.write_text(json.dumps(content))
    with pytest.raises(StorageError, match="99"):
        engram.load(tmp_path)


def test_refits_that_end_apart_are_not_called_random(digits_like):
    model, data, result = digits_like
    check = engram.verify(model, data, result, sample=6, progress=False)
    floor = replace(check.truth.noise_floor, repeated=0.05 * float(check.truth.score.median()))
    apart = replace(check, truth=replace(check.truth, noise_floor=floor))
    assert not apart.deterministic
    assert "not deterministic" not in apart.sentence
    assert "end a little apart" in apart.sentence


@pytest.mark.parametrize(("num_data", "sample"), [(3, 3), (7, 7), (50, 30), (1000, 30), (31, 30)])
def test_the_sample_has_its_size_and_no_repeats(num_data, sample):
    score = torch.rand(num_data, generator=torch.Generator().manual_seed(1))
    chosen, strata = stratified(score, sample, seed=2)
    assert len(chosen) == len(strata) == sample == len(chosen.unique())
    lowest_top, highest_bottom = score[chosen[strata == 0]].min(), score[chosen[strata == 2]].max()
    assert lowest_top >= highest_bottom


def test_wrong_arguments(digits_like):
    model, data, result = digits_like
    with pytest.raises(ArgumentError, match=r"3 to 36; got 37"):
        engram.verify(model, data, result, sample=37, progress=False)
    with pytest.raises(ModelMismatchError, match="these 35 examples"):
        engram.verify(model, (data[0][1:], data[1][1:]), result, progress=False)
    with pytest.raises(ModelMismatchError, match="other targets"):
        engram.verify(model, (data[0], data[1].flip(0)), result, sample=3, progress=False)
    moved = copy.deepcopy(model)
    next(moved.parameters()).data.mul_(1.01)
    with pytest.raises(ModelMismatchError, match="other outputs"):
        engram.verify(moved, data, result, sample=3, progress=False)


def test_data_too_small_to_compare():
    model, data = torch.nn.Linear(3, 2), (torch.randn(2, 3), torch.tensor([0, 1]))
    result = engram.sensitivities(model, data, engram.laplace(model, data, prior_precision=1.0))
    with pytest.raises(ArgumentError, match=r"at least 3 examples.*got 2 examples"):
        engram.verify(model, data, result, sample=2, progress=False)


def test_an_early_stopped_model_is_named(digits_like):
    _, data, _ = digits_like
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    posterior = engram.laplace(model, data, structure="full", progress=False, prior_precision=1.0)
    result = engram.sensitivities(model, data, posterior, progress=False)
    with pytest.raises(ArgumentError, match=r"it is not at a minimum; got none.*FromStart"):
        engram.verify(model, data, result, sample=6, progress=False)
    check = engram.verify(model, data, result, train="newton", sample=6, progress=False)
    assert "had not converged" in check.sentence
    assert check.way == "minimum"
