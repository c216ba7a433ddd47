"""What a page is filled with, and that it refuses what does not fit together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import engram
from engram.errors import DataError
from engram.report.page import Alert, Curves, Examples, Headline, PageData
from engram.report.result_page import CONTRADICTED, MEMORISED, loss_interval, result_data

HEADLINE = Headline("Three", "Three examples.", 0.1, 0.2)
IDS = ["a", "b", "c"]
LOSS = [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"ids": []}, "at least one example"),
        ({"ids": ["a", "b", "a"]}, "an id of its own for each example; got 1 ids twice"),
        ({"score": [1.0]}, r"score of shape \[3\]; got \[1\]"),
        ({"given": [0, 1, 2], "classes": ["x", "y"]}, "given as positions from 0 to 1"),
        ({"trust": [0, 1, 3]}, "trust as positions from 0 to 2"),
        ({"probabilities": np.ones((3, 2))}, r"probabilities of shape \[3, 0\]"),
        ({"flags": {"wrong": [True]}}, r"wrong of shape \[3\]"),
        ({"groups": {"source": ["s"]}}, "source of 3 rows; got 1"),
        ({"texts": ["one"]}, "texts of 3 rows; got 1"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, message):
    given = {"ids": IDS, "loss": LOSS, "loo_loss": LOSS} | columns
    with pytest.raises(DataError, match=message):
        Examples(**given)


def test_an_alert_names_a_flag_that_is_there():
    examples = Examples(IDS, LOSS, LOSS, flags={"memorised": [True, False, True]})
    PageData(HEADLINE, examples, [Alert("2 memorised", flag="memorised")])
    with pytest.raises(DataError, match=r"the flag of an alert among \['memorised'\]; got 'wrong'"):
        PageData(HEADLINE, examples, [Alert("wrong", flag="wrong")])


def test_curves_have_a_value_for_each_step():
    assert Curves([1, 2], [0.3, 0.2], [0.4, 0.5]).loo.tolist() == [0.4, 0.5]
    with pytest.raises(DataError, match="validation of 2 rows; got 1"):
        Curves([1, 2], [0.3, 0.2], [0.4, 0.5], validation=[0.1])


def fitted(likelihood, targets, outputs, **settings):
    torch.manual_seed(0)
    data = (torch.randn(len(targets), 3, dtype=torch.float64), targets)
    model = torch.nn.Linear(3, outputs).double()
    posterior = engram.laplace(model, data, likelihood=likelihood, prior_precision=1.0)
    return engram.sensitivities(model, data, posterior, **settings), model, data


def test_the_map_of_a_ridge_regression_has_left_out_errors_and_leverages():
    """Refitted without each example by the normal equations, and the diagonal of the hat matrix."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    model = torch.nn.Linear(3, 1, bias=False).double()
    ridge = torch.eye(3, dtype=torch.float64)

    def solved(rows):
        return torch.linalg.solve(x[rows].T @ x[rows] + ridge, x[rows].T @ y[rows])

    with torch.no_grad():
        model.weight.copy_(solved(torch.arange(12))[None])
    posterior = engram.laplace(
        model, (x, y), likelihood="gaussian", prior_precision=1.0, structure="full"
    )
    result = engram.sensitivities(model, (x, y), posterior, estimator="corrected")
    examples = result_data(result).examples
    hat = (x @ torch.linalg.solve(x.T @ x + ridge, x.T)).diagonal()
    assert examples.prediction_variance == pytest.approx(hat.numpy(), rel=1e-8)
    for i in range(12):
        left = solved(torch.arange(12) != i)
        assert examples.prediction_error[i] == pytest.approx(
            abs(float(x[i] @ left - y[i])), rel=1e-8
        )
    assert examples.prediction_error * examples.prediction_variance == pytest.approx(examples.score)


def test_a_classifier_says_which_labels_are_contradicted_and_which_memorised():
    result, model, data = fitted("categorical", torch.arange(30) % 3, 3, estimator="linear")
    page = result_data(result, classes=["x", "y", "z"])
    examples = page.examples
    before = model(data[0]).softmax(1).detach()
    without = result.loo_probabilities
    for i in range(30):
        wrong = int(without[i].argmax()) != int(data[1][i])
        assert examples.flags[CONTRADICTED][i] == wrong
        right_before = int(before[i].argmax()) == int(data[1][i])
        assert examples.flags[MEMORISED][i] == (wrong and right_before)
    assert examples.prediction_error == pytest.approx(
        [1 - float(without[i, data[1][i]]) for i in range(30)]
    )
    product = examples.prediction_error * examples.prediction_variance
    assert 2 * product == pytest.approx(examples.score)
    assert page.headline.accuracy == pytest.approx(1 - examples.flags[CONTRADICTED].mean())
    assert page.headline.loo_loss == pytest.approx(result.loo_nll)


def test_a_page_promises_nothing_that_its_verdict_takes_back():
    result, _, _ = fitted("categorical", torch.arange(30) % 3, 3)  # trained for nothing
    assert result.verdict.level == "unreliable"
    assert result_data(result).headline.sentence.endswith(f"{result.verdict.line}.")
    better = replace(result, diagnostics=replace(result.diagnostics, relative_gradient=0.0))
    assert better.verdict.level != "unreliable"
    assert "on unseen data" in result_data(better).headline.sentence


def test_the_interval_counts_an_example_as_often_as_it_stands_for():
    losses, counts = torch.tensor([0.5, 1.0, 3.0]), torch.tensor([2.0, 1.0, 0.0])
    alone = loss_interval(torch.tensor([0.5, 0.5, 1.0]), torch.ones(3))
    assert loss_interval(losses, counts) == pytest.approx(alone)
