"""Trainings on subsets: against closed forms and loops written by hand, resumed, and refused."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, RunFolderError, TrainingError
from engram.retraining.subset_design import designed
from interrupting import condition, surroundings
from retraining_problems import RIDGE, classifier, ridge_fit, ridge_problem

SUBSETS = 12


def ridge(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        model.weight.copy_(ridge_fit(*data).T)


def blank() -> nn.Module:
    return nn.Linear(4, 2, bias=False).double()


def ridge_truth(**settings):
    _, x, y = ridge_problem()
    given = {"subsets": SUBSETS, "keep": 0.7, "train": ridge, "likelihood": RIDGE} | settings
    model = blank if given["subsets"] is not None else blank()
    return engram.retrain(model, (x, y), progress=False, **given)


def noisy(model: nn.Module, data: tuple[Tensor, Tensor]) -> nn.Module:
    """A mini-batch loop as people write it: order and dropout from the global seed."""
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*data), batch_size=8, shuffle=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model.train()
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()


def noisy_truth(**settings):
    _, x, y = classifier()
    given = {"subsets": 18, "train": noisy, "evaluate_on": (x[:9] + 0.1, y[:9])} | settings
    return engram.retrain(net, (x, y), progress=False, **given)


def test_every_number_against_ridge_regression_without_the_left_out() -> None:
    _, x, y = ridge_problem()
    truth = ridge_truth(evaluate_on=(x[:5] + 1, y[:5]))
    fits = [ridge_fit(x[kept], y[kept]) for kept in truth.kept]
    losses = torch.stack([RIDGE.loss(x @ fit, y) for fit in fits])
    torch.testing.assert_close(truth.losses, losses)
    for i in range(len(x)):
        seen, unseen = losses[truth.kept[:, i], i], losses[~truth.kept[:, i], i]
        assert truth.loss_in[i] == pytest.approx(float(seen.mean()))
        assert truth.loss_out[i] == pytest.approx(float(unseen.mean()))
        assert truth.memorisation[i] == pytest.approx(float(unseen.mean() - seen.mean()))
        error = float(unseen.std() / math.sqrt(len(unseen)))
        assert truth.loss_out_error[i] == pytest.approx(error)
        both = math.hypot(error, float(seen.std() / math.sqrt(len(seen))))
        assert truth.memorisation_error[i] == pytest.approx(both)
    assert truth.loo_loss.value == pytest.approx(float(truth.loss_out.mean()))
    assert truth.loss.value == pytest.approx(float(truth.loss_in.mean()))
    tested = torch.stack([RIDGE.loss((x[:5] + 1) @ fit, y[:5]) for fit in fits])
    torch.testing.assert_close(truth.test_loss, tested.mean(1))
    assert truth.loo_loss.value > truth.loss.value + 3 * truth.loss.standard_error


def test_influence_against_means_taken_one_by_one() -> None:
    truth = noisy_truth()
    found = truth.influence()
    values = truth.evaluation_losses
    for i in (0, 7, 35):
        for j in (0, 8):
            seen, unseen = values[truth.kept[:, i], j], values[~truth.kept[:, i], j]
            assert found.change[i, j] == pytest.approx(float(unseen.mean() - seen.mean()))
            error = (seen.var() / len(seen) + unseen.var() / len(unseen)).sqrt()
            assert found.standard_error[i, j] == pytest.approx(float(error))
    assert truth.influence("probability").change.shape == (36, 9)


def test_a_mini_batch_loop_gives_what_it_gives_by_hand() -> None:
    truth, (_, x, y) = noisy_truth(), classifier()
    for number in (0, 17):
        torch.manual_seed(truth.seeds[number])
        model = net()
        torch.manual_seed(truth.seeds[number] + 1)
        kept = truth.kept[number]
        trained = noisy(model, (x[kept], y[kept])).eval()
        torch.testing.assert_close(truth.outputs[number], trained(x).detach(), rtol=0, atol=0)
    probability = truth.outputs.softmax(2)[:, torch.arange(36), y]
    torch.testing.assert_close(truth.probabilities, probability)
    out = torch.stack([truth.outputs.softmax(2)[~truth.kept[:, i], i].mean(0) for i in range(36)])
    torch.testing.assert_close(truth.prediction_out, out)
    expected = torch.tensor(
        [probability[k, i].mean() - probability[~k, i].mean() for i, k in enumerate(truth.kept.T)]
    )
    torch.testing.assert_close(truth.label_memorisation, expected.double())


def test_the_error_of_the_mean_is_that_of_repeated_runs() -> None:
    runs = [noisy_truth(subsets=28, seed=seed).loo_loss for seed in range(12)]
    spread = float(torch.tensor([run.value for run in runs]).std())
    typical = float(torch.tensor([run.standard_error for run in runs]).mean())
    assert 0.5 < typical / spread < 2


@pytest.mark.parametrize(
    ("num_data", "keep", "count"), [(50, 0.85, 20), (37, 0.5, 9), (10, 0.9, 20)]
)
def test_every_example_is_left_out_equally_often(num_data: int, keep: float, count: int) -> None:
    design = designed(count, keep, num_data, seed=3)
    times = (~design.kept).sum(0)
    assert int(times.max() - times.min()) <= 1
    assert int(times.min()) >= 2
    assert set((~design.kept).sum(1).tolist()) == {round(num_data * (1 - keep))}
    longer = designed(count + 5, keep, num_data, seed=3)
    assert torch.equal(longer.kept[:count], design.kept)
    assert longer.seeds[:count] == design.seeds
    assert not torch.equal(designed(count, keep, num_data, seed=4).kept, design.kept)


class StoppedError(Exception):
    """In place of a kill."""


def test_a_killed_run_goes_on_and_a_longer_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"  # no part of what the function is made of, which must stay the same

    def watched(model: nn.Module, data: tuple[Tensor, Tensor]) -> nn.Module:
        with log.open("a") as file:
            file.write(".")
        if log.stat().st_size == int(os.environ["STOP"]):
            raise StoppedError
        return noisy(model, data)

    def run(subsets: int) -> engram.SubsetTruth:
        return noisy_truth(train=watched, subsets=subsets, folder=tmp_path / "run")

    before = surroundings()
    monkeypatch.setenv("STOP", "6")
    with pytest.raises(StoppedError):
        run(18)
    assert surroundings() == before
    assert len(list((tmp_path / "run").glob("subsets-*.safetensors"))) == 5
    monkeypatch.setenv("STOP", "0")
    found, plain = run(18), noisy_truth()
    assert len(log.read_text()) == 6 + 13  # the five finished ones are not repeated
    assert torch.equal(found.outputs, plain.outputs)
    assert torch.equal(run(21).outputs[:18], plain.outputs)
    assert len(log.read_text()) == 6 + 13 + 3


def test_a_damaged_training_is_repeated(tmp_path: Path) -> None:
    first = noisy_truth(folder=tmp_path)
    file = sorted(tmp_path.glob("subsets-*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="damaged"):
        again = noisy_truth(folder=tmp_path)
    assert torch.equal(first.outputs, again.outputs)


@pytest.mark.parametrize("settings", [{"seed": 1}, {"keep": 0.8}, {"train": ridge}])
def test_a_folder_of_another_run_is_refused(tmp_path: Path, settings: dict) -> None:
    noisy_truth(folder=tmp_path)
    with pytest.raises(RunFolderError, match="differ"):
        noisy_truth(folder=tmp_path, **settings)


def test_own_masks_are_folds_and_what_is_not_known_is_said() -> None:
    kept = torch.ones(3, 14, dtype=torch.bool)
    kept[0, :5] = kept[1, 5:10] = False
    truth = ridge_truth(subsets=kept)
    assert torch.equal(truth.kept, kept)
    assert truth.unknown.tolist() == [10, 11, 12, 13]
    assert truth.loss_out.isnan().nonzero()[:, 0].tolist() == [10, 11, 12, 13]
    assert truth.loss_out_error.isnan().all()  # one net each has no spread
    assert "not known             4 examples" in repr(truth)
    assert truth.loo_loss.value == pytest.approx(float(truth.loss_out[:10].mean()))
    assert math.isnan(truth.loo_loss.standard_error)


def test_all_trainings_start_from_a_model_that_is_not_trained() -> None:
    torch.manual_seed(0)
    model, (_, x, y) = net(), classifier()
    before = condition(model)
    truth = engram.retrain(model, (x, y), subsets=18, train=noisy, keep_models=True, progress=False)
    torch.manual_seed(truth.seeds[3] + 1)
    again = noisy(copy.deepcopy(model), (x[truth.kept[3]], y[truth.kept[3]])).eval()
    torch.testing.assert_close(truth.outputs[3], again(x).detach(), rtol=0, atol=0)
    assert torch.equal(truth.model(3, model).eval()(x), again(x))
    assert condition(model) == before


def test_a_trained_model_is_refused_unless_the_function_makes_its_own() -> None:
    _, x, y = classifier()
    trained = net()
    for _ in range(10):
        noisy(trained, (x, y))
    with pytest.raises(ArgumentError, match=r"not been trained yet.*loss 0\.\d+.*shuffled"):
        engram.retrain(trained, (x, y), subsets=18, train=noisy, progress=False)
    own = engram.retrain(
        trained, (x, y), subsets=18, train=lambda model, data: noisy(net(), data), progress=False
    )
    assert own.num_trainings == 18


def test_it_is_saved_and_read(tmp_path: Path) -> None:
    truth = noisy_truth(keep_models=True)
    read = engram.load(truth.save(tmp_path))
    assert repr(read) == repr(truth)
    assert read.to_frame().equals(truth.to_frame())
    assert torch.equal(read.influence().change, truth.influence().change)
    assert read.seeds == truth.seeds


def test_the_words_and_the_frame() -> None:
    truth = noisy_truth()
    assert "Trained 18 times on 86% of 36 examples (function noisy)" in repr(truth)
    assert f"loo loss              {truth.loo_loss}" in repr(truth)
    assert "left out              2 to 3 times" in repr(truth)
    assert {"loss_out", "memorisation_error", "label_memorisation"} <= set(truth.to_frame())


def nothing(model: nn.Module, data: object) -> None:
    return None


def number(model: nn.Module, data: object) -> float:
    return 0.3


def another(model: nn.Module, data: object) -> nn.Module:
    return nn.Linear(7, 2).double()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": nothing}, "nothing, with all weights as before"),
        ({"train": number}, "got float"),
        ({"train": another}, "same parameters"),
    ],
)
def test_functions_that_do_not_train(settings: dict, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        ridge_truth(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"subsets": 3}, r"at least 7 subsets.*got 3, each without 4 of 14"),
        ({"subsets": 0}, "number of subsets"),
        ({"subsets": 2.5}, "number of subsets"),
        ({"subsets": torch.ones(3, 14)}, r"bool tensor \[S, 14\]"),
        ({"subsets": torch.ones(3, 9, dtype=torch.bool)}, r"a tensor \[3, 9\]"),
        ({"subsets": torch.zeros(3, 14, dtype=torch.bool)}, "none in row 0"),
        ({"keep": 1.0}, "keep between 0 and 1"),
        ({"keep": 0}, "keep between 0 and 1"),
        ({"keep": -0.5}, "keep between 0 and 1"),
        ({"train": "newton"}, "training function.*train=newton"),
        ({"train": engram.recipes.Adam()}, "training function.*Adam"),
        ({"train": lambda model: model}, "take both arguments"),
        ({"indices": [0]}, "either subsets or a choice of examples.*indices"),
        ({"groups": [[0]]}, "either subsets or a choice of examples.*groups"),
        ({"classes": True}, "either subsets or a choice of examples.*classes"),
        ({"seed": -1}, "seed"),
        ({"workers": 0}, "number of workers"),
        ({"workers": 1.5}, "number of workers"),
        ({"subsets": None, "train": "newton", "workers": 2}, "workers= beside subsets="),
    ],
)
def test_wrong_arguments(settings: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ridge_truth(**settings)


def test_what_is_asked_of_the_truth_must_be_there() -> None:
    truth = ridge_truth()
    with pytest.raises(ArgumentError, match="evaluate_on="):
        truth.influence()
    with pytest.raises(ArgumentError, match="evaluate_on="):
        _ = truth.test_loss
    with pytest.raises(ArgumentError, match="labels"):
        _ = truth.label_memorisation
    with pytest.raises(ArgumentError, match="keep_models=True"):
        truth.model(0, blank())
    with pytest.raises(ArgumentError, match="measure"):
        noisy_truth().influence("accuracy")


def test_a_maker_that_makes_no_model() -> None:
    _, x, y = ridge_problem()
    with pytest.raises(ArgumentError, match="one that makes 3"):
        engram.retrain(lambda: 3, (x, y), subsets=12, train=ridge, likelihood=RIDGE)
