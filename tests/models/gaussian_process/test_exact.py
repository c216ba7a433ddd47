"""Exact Gaussian process regression: leaving data out against conditioning on the rest."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch

import engram
from engram.errors import (
    ArgumentError,
    DataError,
    EngramError,
    LikelihoodError,
    ModelMismatchError,
    NonFiniteError,
    PosteriorError,
)
from engram.models.gaussian_process import (
    NewPoints,
    exact_gaussian_process,
    from_exact_gp,
    points_of,
)

N = 25


def kernel(a, b):
    return 1.3 * torch.exp(-0.5 * (a[:, None] - b[None]) ** 2 / 0.4)


@pytest.fixture(params=["one noise", "noise per example"])
def problem(request):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(N, generator=generator, dtype=torch.float64) * 6
    y = torch.sin(2 * x) + 0.2 * torch.randn(N, generator=generator, dtype=torch.float64)
    noise = torch.full((N,), 0.05, dtype=torch.float64)
    if request.param == "noise per example":
        noise = 0.01 + 0.3 * torch.rand(N, generator=generator, dtype=torch.float64)
    mean = 0.1 * x
    return x, y, noise, mean


def condition(problem, kept, at):
    """Posterior mean and variance of the function at ``at`` from the kept data, from scratch."""
    x, y, noise, mean = problem
    square = kernel(x[kept], x[kept]) + torch.diag(noise[kept])
    cross = kernel(at, x[kept])
    solved = torch.linalg.solve(square, cross.T)
    posterior = 0.1 * at + solved.T @ (y - mean)[kept]
    return posterior, 1.3 - (cross * solved.T).sum(1)


def process(problem):
    x, y, noise, mean = problem
    return exact_gaussian_process(kernel(x, x), y, noise, mean)


def test_leaving_each_example_out(problem):
    x, y, noise, _ = problem
    gp = process(problem)
    result = gp.sensitivities()
    for i in range(N):
        kept = torch.arange(N) != i
        mean, variance = condition(problem, kept, x[i : i + 1])
        total = variance + noise[i]
        density = -0.5 * (y[i] - mean) ** 2 / total - 0.5 * torch.log(2 * math.pi * total)
        assert torch.allclose(gp.loo_mean[i : i + 1], mean, atol=1e-10)
        assert torch.allclose(gp.loo_variance[i : i + 1], total, atol=1e-10)
        assert torch.allclose(gp.loo_log_density[i : i + 1], density, atol=1e-10)
        assert torch.allclose(result.outputs[i] + result.deviation[i], mean, atol=1e-10)
        assert torch.allclose(result.loo_loss[i : i + 1], -density, atol=1e-10)


def test_its_text_is_short(problem):
    assert repr(process(problem)).startswith("ExactGaussianProcess(N=")
    assert len(repr(process(problem))) < 100


def test_the_posterior_with_all_data(problem):
    x, y, noise, mean = problem
    gp = process(problem)
    answer, variance = condition(problem, torch.ones(N, dtype=torch.bool), x)
    assert torch.allclose(gp.mean, answer, atol=1e-10)
    assert torch.allclose(gp.variance, variance, atol=1e-10)
    normal = torch.distributions.MultivariateNormal(mean, kernel(x, x) + torch.diag(noise))
    assert gp.log_marginal_likelihood == pytest.approx(float(normal.log_prob(y)), abs=1e-9)


def test_linear_is_variance_times_error(problem):
    _, y, noise, _ = problem
    gp = process(problem)
    linear = gp.sensitivities("linear")
    assert torch.allclose(linear.deviation[:, 0], gp.variance * (gp.mean - y) / noise, atol=1e-12)
    leverage = gp.variance / noise
    exact = gp.sensitivities().deviation[:, 0]
    assert torch.allclose(linear.deviation[:, 0] / (1 - leverage), exact, atol=1e-9)
    assert torch.allclose(linear.leverage, leverage)


@pytest.mark.parametrize("group", [[3], [0, 5, 7, 20], list(range(1, N))])
def test_leaving_a_group_out(problem, group):
    x, y, noise, mean = problem
    kept = torch.ones(N, dtype=torch.bool)
    kept[group] = False
    grid = torch.linspace(-1, 7, 11, dtype=torch.float64)
    points = NewPoints(0.1 * grid, kernel(grid, x), torch.full((11,), 1.3, dtype=torch.float64))
    removed = process(problem).remove(group, evaluate_on=points)
    answer, variance = condition(problem, kept, x)
    test_mean, test_variance = condition(problem, kept, grid)
    assert torch.allclose(removed.mean, answer, atol=1e-9)
    assert torch.allclose(removed.variance, variance, atol=1e-9)
    assert torch.allclose(removed.deviation, answer - process(problem).mean, atol=1e-9)
    assert torch.allclose(removed.test_mean, test_mean, atol=1e-9)
    assert torch.allclose(removed.test_variance, test_variance, atol=1e-9)
    rest = exact_gaussian_process(kernel(x[kept], x[kept]), y[kept], noise[kept], mean[kept])
    joint = process(problem).log_marginal_likelihood - rest.log_marginal_likelihood
    assert removed.log_density == pytest.approx(joint, abs=1e-8)


@pytest.mark.parametrize("share", [0.5, -1.0, 0.0, 1.0])
def test_reweighting_is_another_noise(problem, share):
    x, y, noise, mean = problem
    group = [2, 9]
    removed = process(problem).remove(group, weights=[share, share])
    keep = torch.ones(N, dtype=torch.bool)
    changed = noise.clone()
    if share == 1.0:
        keep[group] = False
    else:
        changed[group] = noise[group] / (1 - share)
    answer, variance = condition((x, y, changed, mean), keep, x)
    assert torch.allclose(removed.mean, answer, atol=1e-9)
    assert torch.allclose(removed.variance, variance, atol=1e-9)


def test_tiny_noise_stays_accurate():
    """Leverages of 1 - 1e-8 are legitimate here; the guard of approximate posteriors is not."""
    x = torch.linspace(0, 5, 6, dtype=torch.float64)
    problem = (x, x.sin(), torch.full((6,), 1e-8, dtype=torch.float64), 0.1 * x)
    result = process(problem).sensitivities()
    for i in range(6):
        mean, _ = condition(problem, torch.arange(6) != i, x[i : i + 1])
        assert torch.allclose(result.outputs[i] + result.deviation[i], mean, atol=1e-6)
    assert not result.flagged.any()


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(1)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("fixed", [False, True])
def test_gpytorch_model_is_read(problem, fixed):
    """Leave one out by giving GPyTorch the rest of the data, and asking it for the prediction."""
    x, y, noise, _ = problem
    if fixed:
        likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    else:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
    torch.manual_seed(0)
    model = Regression(x[:, None], y, likelihood).double()
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gp = from_exact_gp(model)
    grid = torch.linspace(0, 6, 5, dtype=torch.float64)
    mean, variance = gp.predict(points_of(model, grid))
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    left = gp.leave_one_out()
    for i in (0, 4, 11):
        kept = torch.arange(N) != i
        rest = likelihood
        if fixed:
            rest = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise[kept])
        other = Regression(x[kept, None], y[kept], rest).double()
        other.load_state_dict(model.state_dict(), strict=False)
        with torch.no_grad():
            prediction = other.eval()(x[i : i + 1, None])
        assert torch.allclose(gp.mean[i] + left.deviation[i], prediction.mean, atol=1e-6)
        assert torch.allclose(left.variance[i], prediction.variance, atol=1e-6)
    with torch.no_grad():
        prediction = model.eval()(grid[:, None])
    assert torch.allclose(mean, prediction.mean, atol=1e-6)
    assert torch.allclose(variance, prediction.variance, atol=1e-6)


def test_the_result_is_one_like_any_other(problem, tmp_path):
    result = process(problem).sensitivities()
    assert len(result.top(3)) == 3
    assert "loo_loss" in result.to_frame()
    read = engram.load(result.save(tmp_path))
    assert torch.equal(read.loo_loss, result.loo_loss)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"covariance": -torch.eye(3)}, PosteriorError, "smallest eigenvalue -1"),
        ({"covariance": torch.ones(3, 3).triu()}, PosteriorError, "symmetric"),
        ({"covariance": torch.eye(2)}, DataError, "one row per target"),
        ({"covariance": torch.full((3, 3), math.nan)}, NonFiniteError, "finite covariance"),
        ({"targets": torch.tensor([0.0, math.inf, 1.0])}, NonFiniteError, "finite targets"),
        ({"noise_variance": 0.0}, LikelihoodError, "positive noise variances"),
        ({"noise_variance": torch.ones(2)}, LikelihoodError, "or 3, one per example"),
        ({"prior_mean": torch.zeros(2)}, DataError, "one prior mean, or 3"),
    ],
)
def test_bad_input(change, kind, message):
    arguments = {"covariance": torch.eye(3), "targets": torch.zeros(3), "noise_variance": 1.0}
    with pytest.raises(kind, match=message) as caught:
        exact_gaussian_process(**(arguments | change))
    assert isinstance(caught.value, EngramError)


def test_what_cannot_be_removed():
    gp = exact_gaussian_process(torch.eye(3), torch.zeros(3), 1.0)
    with pytest.raises(ArgumentError, match="some data to remain"):
        gp.remove([0, 1, 2])
    with pytest.raises(PosteriorError, match="weights of at most 1"):
        gp.remove([0], weights=[1.5])
    with pytest.raises(ArgumentError, match="indices from 0 to 2"):
        gp.remove([3])
    with pytest.raises(DataError, match="cross covariance"):
        gp.predict(NewPoints(torch.zeros(2), torch.zeros(2, 2), torch.ones(2)))
    with pytest.raises(ArgumentError, match="linear, corrected"):
        gp.sensitivities("newton")


def test_other_gpytorch_models():
    with pytest.raises(ModelMismatchError, match="ExactGP"):
        from_exact_gp(torch.nn.Linear(1, 1))
    x, y = torch.zeros(3, 1), torch.zeros(3)
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood())
    model.likelihood = gpytorch.likelihoods.StudentTLikelihood()
    with pytest.raises(LikelihoodError, match="GaussianLikelihood or Fixed"):
        from_exact_gp(model)
