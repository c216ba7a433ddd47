"""Losses without derivatives: covariances over the posterior against closed expectations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError
from engram.likelihoods.nondifferentiable import Absolute, Hinge, ZeroOne

LOSSES = {
    "hinge": (Hinge(), lambda f, y: (1 - y[:, 0] * f[:, 0]).clamp(min=0)),
    "zero_one": (ZeroOne(), lambda f, y: (y[:, 0] * f[:, 0] < 0).double()),
    "absolute": (Absolute(), lambda f, y: (f - y).abs()[:, 0]),
}


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor], engram.Posterior]:
    torch.manual_seed(0)
    x = torch.randn(25, 2).double()
    y = (x[:, :1] + 0.3 * torch.randn(25, 1).double()).sign()
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.tensor([[0.8, 0.1]]).double()
    posterior = engram.laplace(model, (x, y), likelihood="gaussian", prior_precision=1.0)
    return model, (x, y), posterior


@pytest.mark.parametrize("name", LOSSES)
def test_a_linear_model_has_the_derivative_of_the_expectation(name: str) -> None:
    """V times the slope of E[loss] by the mean, which closed forms know."""
    model, (x, y), posterior = problem()
    expected, plain = LOSSES[name]
    variance = engram.prediction_variance(model, x, posterior)[:, :, 0]
    mean = model(x).detach()
    slope = expected.residual(mean, variance, y)
    found = engram.loss_covariances(model, (x, y), posterior, plain, samples=2000, seed=1)
    truth = variance * slope
    within = (found.deviation - truth).abs() / found.error.clamp(min=1e-3)
    assert float((within < 4).double().mean()) > 0.97  # four standard errors
    correlation = torch.corrcoef(torch.cat([found.deviation, truth], dim=1).T)[0, 1]
    assert correlation > 0.98
    loss = expected.loss(mean, variance, y)
    torch.testing.assert_close(found.expected_loss, loss, atol=0.03, rtol=0.1)


def test_a_smooth_loss_has_the_deviation_of_its_expected_gradient() -> None:
    model, (x, y), posterior = problem()

    def logistic(f: Tensor, y: Tensor) -> Tensor:
        return nn.functional.softplus(-y * f)[:, 0]

    found = engram.loss_covariances(model, (x, y), posterior, logistic, samples=2500, step_size=0.5)
    variance = engram.prediction_variance(model, x, posterior)[:, :, 0]
    nodes, shares = (torch.tensor(a) for a in _gauss_hermite(60))
    mean = model(x).detach()
    points = mean + variance.sqrt() * nodes
    slope = ((-y * torch.sigmoid(-y * points)) * shares).sum(1, keepdim=True)
    torch.testing.assert_close(found.deviation, 0.5 * variance * slope, atol=0.002, rtol=0.15)


def _gauss_hermite(count: int):
    from numpy.polynomial.hermite_e import hermegauss

    nodes, weights = hermegauss(count)
    return nodes, weights / math.sqrt(2 * math.pi)


def test_a_loss_gives_a_number_an_example() -> None:
    model, data, posterior = problem()
    with pytest.raises(ArgumentError, match=r'shape \(25,\).*reduction="none"'):
        engram.loss_covariances(model, data, posterior, nn.functional.l1_loss)
    with pytest.raises(ArgumentError, match="a loss function"):
        engram.loss_covariances(model, data, posterior, "hinge")
