"""Sparse variational Gaussian processes of GPyTorch: closed form, GPyTorch itself, refits."""

from __future__ import annotations

from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
)

from engram.errors import (
    PosteriorError,
)
from engram.models.gaussian_process import (
    exact_gaussian_process,
    fit_sparse,
    read_sparse,
    sparse_sensitivities,
)
from sparse_processes import (
    DISTRIBUTIONS,
    GRID,
    LIKELIHOODS,
    STRATEGIES,
    N,
    Sparse,
    function,
    gaussian_noise,
    targets_for,
)


@pytest.fixture
def inputs():
    return torch.rand(N, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("per_example", [False, True])
def test_all_points_inducing_equals_the_closed_form(inputs, strategy, distribution, per_example):
    """One natural-gradient step of size 1 is the exact posterior, and so is every left-out one."""
    y = targets_for("gaussian", inputs)
    noise = torch.full((N,), 0.1, dtype=torch.float64)
    likelihood = gaussian_noise()
    if per_example:
        noise = noise + function(inputs) ** 2
        likelihood = FixedNoiseGaussianLikelihood(noise)
    model = Sparse(inputs, strategy, distribution)
    model.covar_module.base_kernel.lengthscale = 0.3
    fit_sparse(model, likelihood, (inputs, y), num_steps=1)
    with torch.no_grad():
        prior = model.forward(inputs)
    exact = exact_gaussian_process(prior.covariance_matrix, y, noise, prior.mean)
    for estimator in ("linear", "corrected"):
        sparse = sparse_sensitivities(model, likelihood, (inputs, y), estimator)
        answer = exact.sensitivities(estimator)
        assert torch.allclose(sparse.outputs, answer.outputs, atol=1e-7)
        assert torch.allclose(sparse.deviation, answer.deviation, atol=1e-6)
        assert torch.allclose(sparse.loss, answer.loss, atol=1e-6)
        assert torch.allclose(sparse.loo_loss, answer.loo_loss, atol=1e-6)
        assert torch.allclose(sparse.leverage, answer.leverage, atol=1e-7)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_marginals_are_those_of_gpytorch(inputs, kind, strategy):
    make, tasks = LIKELIHOODS[kind]
    model = Sparse(GRID, strategy, CholeskyVariationalDistribution, tasks)
    likelihood = make()
    fitted = fit_sparse(model, likelihood, (inputs, targets_for(kind, inputs)), num_steps=3)
    with torch.no_grad():
        prediction = model.eval()(inputs)
    shape = fitted.latent.marginals.mean.shape
    assert torch.allclose(prediction.mean.reshape(shape), fitted.latent.marginals.mean, atol=1e-7)
    variance = fitted.latent.marginals.total_variance
    assert torch.allclose(prediction.variance.reshape(shape), variance, atol=1e-7)


@pytest.mark.parametrize("kind", ["gaussian", "bernoulli", "poisson"])
def test_a_step_is_the_step_of_gpytorch(inputs, kind):
    """The appendix's update and GPyTorch's NGD are one; so are the objectives."""
    make, _ = LIKELIHOODS[kind]
    y = targets_for(kind, inputs)
    with gpytorch.settings.num_gauss_hermite_locs(100):
        likelihood = make().double()
    ours, theirs = Sparse(GRID), Sparse(GRID)
    start = fit_sparse(ours, likelihood, (inputs, y), num_steps=2, step_size=0.3)
    theirs.load_state_dict(ours.state_dict())
    objective = gpytorch.mlls.VariationalELBO(likelihood, theirs, num_data=N)
    optimizer = gpytorch.optim.NGD(theirs.variational_parameters(), num_data=N, lr=0.2)
    loss = -objective(theirs.train()(inputs), y)
    loss.backward()
    optimizer.step()
    fit_sparse(ours, likelihood, (inputs, y), num_steps=1, step_size=0.2)
    # GPyTorch's log of the normal distribution function is itself off by up to 2e-3
    accuracy = 1e-4 if kind == "bernoulli" else 1e-7
    assert float(loss.detach()) * N == pytest.approx(start.latent.objective, rel=accuracy)
    for name, value in theirs.state_dict().items():
        assert torch.allclose(value, ours.state_dict()[name], atol=100 * accuracy), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deviation_of_the_inducing_values(inputs, strategy):
    """S^-1 a_i e_i as the paper writes it, before any whitening."""
    y = targets_for("bernoulli", inputs)
    model = Sparse(GRID, strategy)
    fitted = fit_sparse(model, BernoulliLikelihood(), (inputs, y), num_steps=4, step_size=0.5)
    with torch.no_grad():
        prior = model.forward(torch.cat([GRID, inputs])).covariance_matrix
    square = prior[:10, :10] + 1e-10 * torch.eye(10, dtype=torch.float64)
    interpolation = torch.linalg.solve(square, prior[:10, 10:]).T
    root = fitted.prior.factor[0]
    covariance = root @ torch.linalg.inv(fitted.latent.precision[0]) @ root.T
    residual = fitted.latent.marginals.residual
    answer = (interpolation @ covariance) * residual
    moved = fitted.inducing_deviations()[:, 0]
    assert torch.allclose(moved, answer, atol=1e-7)
    linear = sparse_sensitivities(model, BernoulliLikelihood(), (inputs, y), "linear")
    own = (interpolation * moved).sum(1)
    assert torch.allclose(linear.deviation[:, 0], own, atol=1e-7)
    assert torch.allclose(linear.deviation, fitted.latent.marginals.variance * residual, atol=1e-9)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_leave_one_out_against_refitting(inputs, kind):
    make, tasks = LIKELIHOODS[kind]
    y, likelihood = targets_for(kind, inputs), make().double()
    model = Sparse(GRID, tasks=tasks)
    fitted = fit_sparse(model, likelihood, (inputs, y), num_steps=40, step_size=0.8).latent
    assert fitted.natural_gradient_length < 1e-6
    result = sparse_sensitivities(model, likelihood, (inputs, y))
    deviation, increase, kept = [], [], torch.arange(N)
    for i in range(0, N, 4):
        rest = fitted.on(kept[kept != i])
        rest = replace(rest, precision=fitted.remove([i]).precision)
        for _ in range(12):
            rest = rest.step(0.8)
        own = replace(fitted, mean=rest.mean, precision=rest.precision).marginals
        deviation.append(own.mean[i] - result.outputs[i])
        loss = fitted.loss.predictive_loss(own.mean, own.total_variance, fitted.targets)
        increase.append(loss[i] - result.loss[i])
    truth, estimate = torch.stack(deviation).flatten(), result.deviation[::4].flatten()
    gain, guess = torch.stack(increase), (result.loo_loss - result.loss)[::4]
    # Independent posteriors of the classes leave out how these pull on each other.
    accuracy = {"gaussian": 1e-6, "softmax": 0.25}.get(kind, 0.12)
    assert (estimate - truth).norm() < accuracy * truth.norm()
    assert torch.corrcoef(torch.stack([estimate, truth]))[0, 1] > 0.99
    assert torch.corrcoef(torch.stack([guess, gain]))[0, 1] > 0.98
    assert float(guess.sum() / gain.sum()) == pytest.approx(1, abs=accuracy)


def test_groups_are_exact_for_gaussian_noise(inputs):
    y, likelihood = targets_for("gaussian", inputs), gaussian_noise()
    data = (inputs, y)
    fitted = fit_sparse(Sparse(GRID), likelihood, data, num_steps=1).latent
    group = torch.arange(12)
    without = fitted.remove(group)
    refitted = fitted.on(torch.arange(12, N)).step(1.0)
    assert torch.allclose(without.mean, refitted.mean, atol=1e-8)
    assert torch.allclose(without.precision, refitted.precision, atol=1e-7)
    half = fitted.remove(group, weights=[0.5] * 12).remove(group, weights=[0.5] * 12)
    assert torch.allclose(half.precision, refitted.precision, atol=1e-7)


def test_during_training_with_gpytorch(inputs):
    """The user's own loop of NGD and Adam; what is read changes nothing and settles down."""
    y, likelihood = targets_for("bernoulli", inputs), BernoulliLikelihood()
    model = Sparse(GRID).train()
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=N)
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=N, lr=0.3)
    other = torch.optim.Adam(model.hyperparameters(), lr=0.02)
    lengths = []
    for _ in range(30):
        natural.zero_grad()
        other.zero_grad()
        (-objective(model(inputs), y)).backward()
        natural.step()
        other.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        seed = torch.get_rng_state()
        result = sparse_sensitivities(model, likelihood, (inputs, y))
        assert all(torch.equal(v, state[name]) for name, v in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), seed)
        assert model.training
        lengths.append(result.provenance["settings"]["natural_gradient_length"])
    assert lengths[-1] < 0.1 * lengths[0]
    assert result.loo_nll > result.train_nll


def test_batches_lead_to_the_same_place(inputs):
    y, likelihood = targets_for("gaussian", inputs), gaussian_noise()
    whole = fit_sparse(Sparse(GRID), likelihood, (inputs, y), num_steps=1)
    assert len(repr(whole)) < 300
    model = Sparse(GRID)
    fit_sparse(model, likelihood, (inputs, y), num_steps=60, step_size=0.1, batch_size=20)
    fit_sparse(model, likelihood, (inputs, y), num_steps=300, step_size=0.01, batch_size=20)
    batches = read_sparse(model, likelihood, (inputs, y))
    difference = batches.latent.marginals.mean - whole.latent.marginals.mean
    assert difference.abs().max() < 0.05


def test_mixing_weights(inputs):
    torch.manual_seed(0)
    likelihood = SoftmaxLikelihood(num_features=2, num_classes=3).double()
    model = Sparse(GRID, tasks=2)
    y = targets_for("softmax", inputs)
    fit_sparse(model, likelihood, (inputs, y), num_steps=20, step_size=0.7)
    result = sparse_sensitivities(model, likelihood, (inputs, y))
    assert result.deviation.shape == (N, 2)
    assert result.prediction_deviation.shape == (N, 3)
    assert result.loo_nll > result.train_nll


def test_mean_field_is_read_but_not_written(inputs):
    y = targets_for("gaussian", inputs)
    model = Sparse(GRID, distribution=MeanFieldVariationalDistribution)
    model(inputs)
    assert sparse_sensitivities(model, gaussian_noise(), (inputs, y)).num_data == N
    with pytest.raises(PosteriorError, match="MeanFieldVariationalDistribution"):
        fit_sparse(model, gaussian_noise(), (inputs, y))
