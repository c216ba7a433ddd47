"""What is called exact, against refits by other means: few rows, dependent columns, any scale."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from engram.errors import EngramError
from engram.models import fit_glm, fit_linear, sensitivities_of
from engram.models.gaussian_process import exact_gaussian_process
from engram.models.variational.linear import fit_variational_linear

KINDS = ("plain", "constant", "collinear", "zero", "far", "twice")


def columns(random, count, width, kind):
    inputs = random.normal(size=(count, width))
    if kind == "constant":
        inputs[:, 0] = 1.0
    if kind == "collinear" and width > 1:
        inputs[:, 1] = 2 * inputs[:, 0]
    if kind == "zero":
        inputs[:, 0] = 0.0
    if kind == "far":
        inputs += 1e6
    if kind == "twice" and count > 1:
        inputs[1] = inputs[0]
    return inputs


def least_squares(matrix, targets, weights, penalty, i):
    """The prediction of example i without it."""
    kept = np.arange(len(targets)) != i
    root = np.sqrt(weights[kept])
    rows = np.r_[root[:, None] * matrix[kept], np.diag(np.sqrt(penalty))]
    right = np.r_[root * targets[kept], np.zeros(len(penalty))]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    return matrix[i] @ (np.linalg.lstsq(rows / scale, right, rcond=1e-14)[0] / scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [0.0, 1e-3, 1.0])
def test_linear(kind, penalty):
    """Refused, NaN and flagged, or equal to the refit."""
    random, compared = np.random.default_rng(2), 0
    sizes = itertools.product((1, 2, 3, 7), (1, 3), (True, False), (1e-8, 1.0, 1e8), (1e-8, 1e8))
    for count, width, intercept, across, up in sizes:
        inputs = across * columns(random, count, width, kind)
        targets, weights = up * random.normal(size=count), random.uniform(0.5, 2.0, count)
        try:
            fit = fit_linear(
                inputs,
                targets,
                penalty=penalty * across**2,
                intercept=intercept,
                weights=weights,
                dispersion=up**2,
            )
        except EngramError:
            continue
        result = sensitivities_of(fit)
        found = (result.outputs + result.deviation)[:, 0].numpy()
        assert result.flagged[np.isnan(found)].all()
        matrix = fit.objective.design.matrix.numpy()
        for i in np.flatnonzero(~np.isnan(found)):
            truth = least_squares(matrix, targets, weights, fit.objective.design.penalty.numpy(), i)
            tolerance = 1e-4 if kind == "far" else 1e-7
            assert found[i] == pytest.approx(truth, rel=tolerance, abs=tolerance * up)
            compared += 1
    assert compared > (50 if penalty else 10) or (kind == "zero" and not penalty)


def refitted(fit, i):
    """Coefficients without example i, by quasi-Newton steps."""
    matrix, kept = fit.objective.design.matrix, torch.arange(len(fit.targets)) != i
    penalty, loss = fit.objective.design.penalty, fit.objective.likelihood.loss

    def objective(values):
        theta = torch.tensor(values, requires_grad=True)
        total = loss(matrix[kept] @ theta[:, None], fit.targets[kept]).sum()
        total = total + 0.5 * (penalty * theta**2).sum()
        return total.item(), torch.autograd.grad(total, theta)[0].numpy()

    start = fit.coefficients[0].numpy()
    return minimize(objective, start, jac=True, options={"gtol": 1e-9, "maxiter": 2000}).x


@pytest.mark.parametrize(
    ("response", "link"),
    [
        ("bernoulli", "logit"),
        ("bernoulli", "probit"),
        ("bernoulli", "cloglog"),
        ("poisson", "log"),
        ("gamma", "log"),
        ("negative_binomial", "log"),
        ("tweedie", "log"),
    ],
)
def test_generalised(response, link):
    """Refused, infinite where the rest has no finite coefficients, or equal to the refit."""
    random, compared = np.random.default_rng(2), 0
    for count, width, penalty in itertools.product((2, 3, 6, 12), (1, 2), (0.0, 1e-2)):
        inputs = random.normal(size=(count, width))
        rate = np.exp(0.5 * inputs[:, 0])
        targets = {
            "bernoulli": (random.random(count) < 0.5).astype(float),
            "poisson": random.poisson(rate).astype(float),
            "negative_binomial": random.poisson(rate).astype(float),
        }.get(response, random.gamma(2.0, rate / 2) + 0.05)
        dispersion = 1.0 if response in ("gamma", "tweedie") else None
        try:
            fit = fit_glm(
                inputs, targets, response, link=link, penalty=penalty, dispersion=dispersion
            )
        except EngramError:
            continue
        result = sensitivities_of(fit)
        for i in range(count):
            theta, found = refitted(fit, i), float(result.loo_loss[i])
            if not math.isfinite(found):
                assert result.flagged[i]
                alone, endless = result.leverage[i] > 1 - 1e-9, np.abs(theta).max() > 2.5
                assert alone if math.isnan(found) else endless
                continue
            output = fit.objective.design.matrix[i : i + 1] @ torch.tensor(theta)[:, None]
            truth = float(fit.likelihood.loss(output, fit.targets[i : i + 1]))
            scale = max(abs(truth), float(result.loss.abs().mean()))
            assert found == pytest.approx(truth, abs=3e-3 * scale)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("noise", [1e-6, 0.1, 1e3])
def test_gaussian_process(count, scale, noise):
    random = np.random.default_rng(7)
    x = np.r_[random.uniform(0, 3, count)][:, None]
    x[-1] = x[0]  # the same input twice
    square = scale**2 * np.exp(-0.5 * (x - x.T) ** 2)
    y, own = scale * random.normal(size=count), noise * scale**2
    process = exact_gaussian_process(
        torch.tensor(square), torch.tensor(y), torch.full((count,), own, dtype=torch.float64)
    )
    result = process.sensitivities()
    for i in range(count):
        kept = np.arange(count) != i
        solved = np.linalg.solve(
            square[np.ix_(kept, kept)] + own * np.eye(count - 1), square[kept, i]
        )
        mean, variance = solved @ y[kept], square[i, i] - solved @ square[kept, i] + own
        loss = 0.5 * ((y[i] - mean) ** 2 / variance + np.log(2 * np.pi * variance))
        assert float(result.loo_loss[i]) == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert float((result.outputs + result.deviation)[i]) == pytest.approx(
            mean, rel=1e-6, abs=1e-6 * scale
        )


@pytest.mark.parametrize("kind", ["plain", "collinear", "twice"])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_latent_gaussian(kind, count):
    """Gaussian noise of variance 1: the variational posterior is ridge regression's own."""
    random = np.random.default_rng(9)
    inputs, targets = columns(random, count, 2, kind), random.normal(size=count)
    fitted = fit_variational_linear(
        torch.tensor(inputs), torch.tensor(targets), "gaussian", prior_precision=0.3
    )
    result = fitted.sensitivities()
    ones, penalty = np.ones(count), np.full(2, 0.3)
    for i in range(count):
        truth = least_squares(inputs, targets, ones, penalty, i)
        assert float((result.outputs + result.deviation)[i]) == pytest.approx(truth, abs=1e-8)
