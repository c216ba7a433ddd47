"""Ridge regression: leaving out by the equation equals refitting, to 1e-10."""

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.likelihoods import Gaussian

PRIOR_PRECISION = 0.7
NOISE_VARIANCE = 0.4
LIKELIHOOD = Gaussian(noise_variance=NOISE_VARIANCE)


def features(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1).double()], 1)


def fit(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """argmin sum_i w_i |y_i - z_i B|^2 / (2 s2) + delta/2 |B|^2, the bias last; [D + 1, K]."""
    weights = torch.ones(len(x)).double() if weights is None else weights
    z = features(x)
    gram = z.T @ (weights[:, None] * z) / NOISE_VARIANCE
    moment = z.T @ (weights[:, None] * y) / NOISE_VARIANCE
    return torch.linalg.solve(gram + PRIOR_PRECISION * torch.eye(z.shape[1]).double(), moment)


def as_model(coefficients: Tensor) -> nn.Linear:
    model = nn.Linear(len(coefficients) - 1, coefficients.shape[1]).double()
    with torch.no_grad():
        model.weight.copy_(coefficients[:-1].T)
        model.bias.copy_(coefficients[-1])
    return model


@pytest.fixture(params=[1, 3], ids=["one output", "three outputs"])
def problem(request):
    generator = torch.Generator().manual_seed(request.param)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(12, request.param, generator=generator, dtype=torch.float64)
    model = as_model(fit(x, y))
    posterior = engram.laplace(
        model,
        (x, y),
        likelihood=LIKELIHOOD,
        structure="full",
        prior_precision=PRIOR_PRECISION,
        progress=False,
    )
    return model, x, y, posterior


def refitted_without(x: Tensor, y: Tensor) -> Tensor:
    """Each example's prediction by a model that never saw it."""
    rows = []
    for i in range(len(x)):
        keep = torch.arange(len(x)) != i
        rows.append(features(x[i : i + 1]) @ fit(x[keep], y[keep]))
    return torch.cat(rows)


def gaussian_loss(f: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Normal(f, NOISE_VARIANCE**0.5).log_prob(y).sum(1)


def test_corrected_equals_refitting(problem):
    model, x, y, posterior = problem
    result = engram.sensitivities(model, (x, y), posterior, estimator="corrected", progress=False)
    without = refitted_without(x, y)
    assert (result.outputs + result.deviation - without).abs().max() < 1e-10
    assert (result.prediction_deviation - (without - result.outputs)).abs().max() < 1e-10
    assert (result.loo_loss - gaussian_loss(without, y)).abs().max() < 1e-10
    assert not result.flagged.any()


def test_iterated_converges_to_refitting(problem):
    model, x, y, posterior = problem
    result = engram.sensitivities(
        model,
        (x, y),
        posterior,
        estimator="iterated",
        rounds=200,
        progress=False,
    )
    assert (result.outputs + result.deviation - refitted_without(x, y)).abs().max() < 1e-10


def test_leverage_is_the_hat_matrix(problem):
    model, x, y, posterior = problem
    result = engram.sensitivities(model, (x, y), posterior, estimator="corrected", progress=False)
    z = features(x)
    gram = z.T @ z / NOISE_VARIANCE + PRIOR_PRECISION * torch.eye(z.shape[1]).double()
    hat = z @ torch.linalg.solve(gram, z.T) / NOISE_VARIANCE
    assert (result.leverage - hat.diagonal() * y.shape[1]).abs().max() < 1e-10


@pytest.mark.parametrize("at", ["displaced", "linearised"])
@pytest.mark.parametrize("indices", [[3], [0, 5, 11], list(range(9))])
def test_removing_a_group_equals_refitting(problem, indices, at):
    model, x, y, posterior = problem
    generator = torch.Generator().manual_seed(9)
    test = (
        torch.randn(5, 4, generator=generator, dtype=torch.float64),
        torch.randn(5, y.shape[1], generator=generator, dtype=torch.float64),
    )
    removal = engram.remove(
        model,
        (x, y),
        posterior,
        indices=indices,
        evaluate_on=test,
        at=at,
        progress=False,
    )
    keep = torch.ones(len(x), dtype=torch.bool)
    keep[indices] = False
    refitted = fit(x[keep], y[keep])
    moved = torch.cat(
        [model.weight + removal.delta["weight"], (model.bias + removal.delta["bias"])[:, None]], 1
    )
    assert (moved.T - refitted).abs().max() < 1e-10
    assert (removal.evaluation.outputs_without - features(test[0]) @ refitted).abs().max() < 1e-10
    expected = gaussian_loss(features(x[indices]) @ refitted, y[indices])
    assert (removal.group.loss_without - expected).abs().max() < 1e-9


@pytest.mark.parametrize("epsilon", [0.25, 0.8, -1.0, -3.0])
def test_reweighting_equals_refitting(problem, epsilon):
    """eps is the share taken away: the example's weight becomes 1 - eps."""
    model, x, y, posterior = problem
    removal = engram.remove(
        model,
        (x, y),
        posterior,
        indices=[2, 7],
        weights=[epsilon, 0.5 * epsilon],
        progress=False,
    )
    weights = torch.ones(len(x)).double()
    weights[2] -= epsilon
    weights[7] -= 0.5 * epsilon
    refitted = fit(x, y, weights)
    assert (model.weight + removal.delta["weight"] - refitted[:-1].T).abs().max() < 1e-10
    assert (model.bias + removal.delta["bias"] - refitted[-1]).abs().max() < 1e-10


def test_last_layer_over_fixed_features_equals_refitting():
    """A network whose last layer alone is fitted is ridge regression on its features."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    z = body(x).detach()
    model = nn.Sequential(body, as_model(fit(z, y)))
    posterior = engram.laplace(
        model,
        (x, y),
        likelihood=LIKELIHOOD,
        structure="last_layer",
        prior_precision=PRIOR_PRECISION,
        progress=False,
    )
    result = engram.sensitivities(model, (x, y), posterior, estimator="corrected", progress=False)
    assert (result.outputs + result.deviation - refitted_without(z, y)).abs().max() < 1e-10
