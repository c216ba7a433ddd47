"""Two models on the same data: the difference of their leave-one-out losses, and its error."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import engram
from engram.errors import ArgumentError, ModelMismatchError, NonFiniteError
from engram.sensitivity.comparison import paired


def fitted(columns, outputs=3, seed=0, num_data=120):
    """A multinomial logistic regression on some columns of data that stay the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_data, outputs, generator=generator, dtype=torch.float64)
    y = (2 * x[:, :outputs] + noise).argmax(1)
    torch.manual_seed(seed)
    data, model = (x[:, :columns], y), nn.Linear(columns, outputs).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), y, reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    posterior = engram.laplace(model, data, structure="full", prior_precision=1.0, progress=False)
    return engram.sensitivities(model, data, posterior, progress=False)


@pytest.fixture(scope="module")
def results():
    return {"small": fitted(1), "large": fitted(4)}


def test_the_difference_is_the_paired_t_statistic(results):
    comparison = engram.compare(results)
    found = comparison.difference("small", "large")
    small, large = (results[name].loo_loss.numpy() for name in ("small", "large"))
    expected = stats.ttest_rel(small, large)
    assert found.mean == pytest.approx(np.mean(small - large), rel=1e-12)
    assert found.mean / found.standard_error == pytest.approx(expected.statistic, rel=1e-10)
    assert found.chance_worse == pytest.approx(stats.norm.cdf(expected.statistic), abs=1e-12)
    back = comparison.difference("large", "small")
    assert back.mean == pytest.approx(-found.mean)
    assert back.chance_worse == pytest.approx(1 - found.chance_worse, abs=1e-12)


def test_the_best_comes_first_and_has_no_difference(results):
    comparison = engram.compare(results)
    assert comparison.best == "large"
    frame = comparison.to_frame()
    assert list(frame.index) == ["large", "small"]
    assert frame.loc["large", "difference"] == 0
    assert frame.loc["large", "chance_worse"] == 0.5
    assert frame.loc["small", "loo_loss"] == pytest.approx(results["small"].loo_nll)
    for metric in ("accuracy", "brier_score", "calibration_error"):
        expected = results["small"].metrics().loc[metric, "leave_one_out"]
        assert frame.loc["small", metric] == pytest.approx(expected)
    assert frame.loc["small", "verdict"] == results["small"].verdict.level


def test_two_classes_have_an_auroc():
    frame = engram.compare({"a": fitted(1, 2), "b": fitted(2, 2)}).to_frame()
    assert frame["auroc"].between(0.5, 1).all()


def test_a_row_counts_as_often_as_it_stands_for(results):
    differences = torch.tensor([1.0, -1.0, 3.0], dtype=torch.float64)
    counts = torch.tensor([2.0, 0.0, 3.0])
    expanded = torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    expected = paired(expanded, torch.ones(5))
    assert paired(differences, counts) == expected
    assert expected.standard_error == pytest.approx(float(expanded.std()) / math.sqrt(5))


def test_equal_losses_and_equal_differences_leave_nothing_to_chance():
    assert paired(torch.zeros(5), torch.ones(5)).chance_worse == 0.5
    assert paired(torch.ones(5), torch.ones(5)).chance_worse == 1.0


def test_the_print_has_what_decides(results):
    text = str(engram.compare(results))
    assert "2 models on the same 120 examples, nats per example" in text
    assert "worse with" in text
    assert "±" in text


def test_models_that_predict_alike_are_said_to(results):
    notes = engram.compare({"a": results["large"], "b": fitted(4, seed=1)}).notes
    assert any("differ by less than 4 nats on all examples together" in note for note in notes)
    few = engram.compare({"a": fitted(1, num_data=40), "b": fitted(4, num_data=40)}).notes
    assert any("fewer than 100 examples" in note for note in few)


@pytest.mark.parametrize("given", [{}, {"one": None}, [1, 2], None])
def test_less_than_two_results_are_refused(given):
    with pytest.raises(ArgumentError, match="two results or more by name"):
        engram.compare(given)


def test_what_is_no_result_is_refused(results):
    with pytest.raises(ArgumentError, match=r"a result of engram\.sensitivities"):
        engram.compare(results | {"third": "run/"})


def test_other_data_are_refused(results):
    with pytest.raises(ModelMismatchError, match="'small' has 120 examples; got 'other' with 60"):
        engram.compare({"small": results["small"], "other": fitted(1, num_data=60)})
    other = results["large"]
    swapped = replace(other, targets=other.targets.flip(0))
    with pytest.raises(ModelMismatchError, match="got other targets in 'large'"):
        engram.compare(results | {"large": swapped})
    shifted = replace(other, indices=other.indices + 1)
    with pytest.raises(ModelMismatchError, match="got other indices in 'large'"):
        engram.compare(results | {"large": shifted})


def test_other_likelihoods_are_refused():
    x = torch.randn(20, 1, dtype=torch.float64)
    model, data = nn.Linear(1, 1).double(), (x, x + 1)

    def result(noise):
        likelihood = engram.likelihoods.Gaussian(noise)
        posterior = engram.laplace(model, data, likelihood=likelihood, prior_precision=1.0)
        return engram.sensitivities(model, data, posterior)

    with pytest.raises(ModelMismatchError, match="losses of two likelihoods have no common scale"):
        engram.compare({"a": result(1.0), "b": result(2.0)})
    frame = engram.compare({"a": result(1.0), "b": result(1.0)}).to_frame()
    assert {"r_squared", "rmse"} <= set(frame.columns)


def test_losses_that_are_no_numbers_are_refused(results):
    other = results["large"]
    loo_loss = other.loo_loss.clone()
    loo_loss[3] = math.nan
    with pytest.raises(NonFiniteError, match="1 of 120 NaN or infinite"):
        engram.compare(results | {"large": replace(other, loo_loss=loo_loss)})


def test_an_unknown_name(results):
    with pytest.raises(ArgumentError, match="one of large, small; got 'medium'"):
        engram.compare(results).difference("medium", "small")
