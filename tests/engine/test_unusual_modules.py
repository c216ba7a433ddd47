"""Modules that are hard to take apart: their deviations are those of plain autograd."""

import pytest
import torch
from torch import nn

import engram
from autograd_deviation import expected_deviation
from fitted import assert_close
from unusual_modules import UNUSUAL, unusual

Y = torch.arange(7) % 3


def linear_deviation(model, x, targets, structure="diagonal", **choice):
    fitted = engram.laplace(
        model, (x, targets), structure=structure, prior_precision=1.0, progress=False, **choice
    )
    choice.pop("curvature", None)
    found = engram.sensitivities(
        model, (x, targets), fitted, estimator="linear", progress=False, **choice
    )
    return found.deviation, fitted


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("name", UNUSUAL)
def test_the_deviation_is_that_of_plain_autograd(name, batch_size):
    model, x = unusual(name)
    found, fitted = linear_deviation(model, x, Y, batch_size=batch_size)
    assert_close(found, expected_deviation(model.eval(), x, Y, fitted), 1e-9)


@pytest.mark.parametrize("name", ["sorted_rows", "selected_rows", "listed_rows"])
def test_rows_in_an_order_of_the_data_stay_with_their_examples(name):
    """The examples on which the passes are planned are in order; later ones are not."""
    model, x = unusual(name)
    found, fitted = linear_deviation(model, x, Y, structure="full", curvature="ggn")
    expected = expected_deviation(model.eval(), x, Y, fitted)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("name", ["experts_of_rows", "sorted_rows", "to_its_device"])
def test_a_single_example(name):
    model, x = unusual(name)
    found, fitted = linear_deviation(model, x[:1], Y[:1])
    assert_close(found, expected_deviation(model.eval(), x[:1], Y[:1], fitted), 1e-9)


@pytest.mark.parametrize("name", ["experts_of_tokens", "packed_lstm", "sorted_rows"])
def test_in_single_precision(name):
    model, x = unusual(name)
    exact, _ = linear_deviation(model, x, Y)
    found, _ = linear_deviation(model.float(), x.float(), Y)
    assert_close(found.double(), exact, 1e-3)


def test_only_what_must_is_run_as_a_whole():
    """Rows in an order of the data are one unit; a table of constant indices keeps its rules."""
    model, x = unusual("sorted_rows")
    fitted = engram.laplace(
        model, (x, Y), structure="diagonal", progress=False, prior_precision=1.0
    )
    assert set(fitted_ways(model, x, fitted).values()) == {"unit"}

    class LastStep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            last = (x[:, :, 0] > 0).sum(1).clamp(min=1) - 1
            return self.head(self.layer(x)[0][torch.arange(len(x)), last])

    model, x = unusual("experts_of_tokens")
    fitted = engram.laplace(
        model, (x, Y), structure="diagonal", progress=False, prior_precision=1.0
    )
    ways = fitted_ways(model, x, fitted)
    assert {ways["head.weight"], ways["experts.gate.weight"]} == {"rule", "unit"}

    torch.manual_seed(0)
    model, x = LastStep().double(), torch.randn(7, 3, 4, dtype=torch.float64)
    fitted = engram.laplace(
        model, (x, Y), structure="diagonal", progress=False, prior_precision=1.0
    )
    assert set(fitted_ways(model, x, fitted).values()) == {"rule"}


def fitted_ways(model, x, fitted):
    return engram.sensitivities(model, (x, Y), fitted, progress=False).coverage
