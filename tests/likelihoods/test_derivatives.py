"""Every method of a likelihood against the loss of one example and autograd."""

import pytest
import torch

from engram.errors import LikelihoodError
from engram.likelihoods.draws import Draws
from fitted import assert_close
from likelihood_cases import LIKELIHOODS, NOISE_VARIANCE

CASE = pytest.mark.parametrize("case", LIKELIHOODS, ids=lambda case: case.name)


def problem(case, num_data=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(num_data, case.num_outputs, generator=generator, dtype=torch.float64)
    return outputs, case.targets(num_data, case.num_outputs, generator)


@CASE
def test_loss_is_the_negative_log_likelihood(case):
    f, y = problem(case)
    assert_close(case.make().loss(f, y), case.dense.losses(f, y), 1e-12)


@CASE
def test_residual_is_the_gradient(case):
    f, y = problem(case)
    assert_close(case.make().residual(f, y), case.dense.residuals(f, y), 1e-10)


@CASE
def test_output_hessian_is_the_second_derivative(case):
    f, y = problem(case)
    assert_close(case.make().output_hessian(f, y), case.dense.hessians(f, y), 1e-10)


@CASE
def test_hessian_times_is_a_matrix_product(case):
    f, y = problem(case)
    u = torch.randn(f.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.einsum("nkl,nl->nk", case.dense.hessians(f, y), u)
    assert_close(case.make().hessian_times(f, y, u), expected, 1e-10)


@CASE
def test_hessian_factor_squares_to_the_hessian(case):
    f, y = problem(case)
    factor = case.make().hessian_factor(f, y)
    assert factor.shape[:2] == f.shape
    assert_close(factor @ factor.mT, case.dense.hessians(f, y), 1e-8)


@CASE
def test_mean_and_its_derivative(case):
    f, _ = problem(case)
    assert_close(case.make().mean(f), case.dense.means(f), 1e-12)
    assert_close(case.make().mean_derivative(f), case.dense.mean_derivatives(f), 1e-10)


@CASE
def test_sampled_residuals_have_the_hessian_as_covariance(case):
    """20 000 draws of one example: five standard errors, from the draws' own fourth moments."""
    f, y = problem(case, num_data=1)
    draws = 20_000
    repeated = y.expand(draws, *y.shape[1:])
    numbers = Draws(2, torch.arange(draws))
    sampled = case.make().sampled_residual(f.expand(draws, -1), repeated, numbers)
    products = torch.einsum("nk,nl->nkl", sampled, sampled)
    error = (products.mean(0) - case.dense.hessians(f, y)[0]).abs()
    assert (error <= 5 * products.std(0) / draws**0.5 + 1e-9).all()
    assert (sampled.mean(0).abs() <= 5 * sampled.std(0) / draws**0.5 + 1e-9).all()


@CASE
def test_sampled_residuals_belong_to_the_examples(case):
    f, y = problem(case)
    numbers = torch.arange(len(f)) + 3
    whole = case.make().sampled_residual(f, y, Draws(5, numbers))
    parts = [case.make().sampled_residual(f[i], y[i], Draws(5, numbers[i])) for i in ([0], [2, 1])]
    assert torch.equal(whole[[0, 2, 1]], torch.cat(parts))
    assert not torch.equal(whole, case.make().sampled_residual(f, y, Draws(6, numbers)))


def test_bernoulli_targets_may_have_a_column():
    f, y = problem(LIKELIHOODS[2])
    likelihood = LIKELIHOODS[2].make()
    assert torch.equal(likelihood.loss(f, y), likelihood.loss(f, y[:, None]))
    assert torch.equal(likelihood.residual(f, y), likelihood.residual(f, y[:, None]))


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
def test_extreme_outputs_stay_finite(name):
    """A confident model is the usual case, and exp(1000) overflows."""
    case = next(case for case in LIKELIHOODS if case.name == name)
    f = torch.zeros(2, case.num_outputs).double()
    f[0, 0], f[1, 0] = 1000.0, -1000.0
    y = torch.tensor([1, 1])
    likelihood = case.make()
    for value in (
        likelihood.loss(f, y),
        likelihood.residual(f, y),
        likelihood.output_hessian(f, y),
        likelihood.hessian_factor(f, y),
        likelihood.mean(f),
    ):
        assert torch.isfinite(value).all()


def test_noise_variance_scales_the_residual():
    f = torch.tensor([[2.0]]).double()
    y = torch.tensor([[0.5]]).double()
    likelihood = next(case for case in LIKELIHOODS if case.name == "gaussian").make()
    assert float(likelihood.residual(f, y)) == pytest.approx(1.5 / NOISE_VARIANCE)


def test_names_stand_for_likelihoods():
    import engram
    from cases import MLP

    named = engram.laplace(
        MLP.model, MLP.data, likelihood="categorical", progress=False, prior_precision=1.0
    )
    made = engram.laplace(
        MLP.model, MLP.data, likelihood=MLP.public_likelihood, progress=False, prior_precision=1.0
    )
    assert named.log_det() == made.log_det()


@CASE
def test_the_mean_loss_follows_from_mean_statistics(case):
    likelihood, (f, y) = case.make(), problem(case)
    outputs = [f, f + 0.3, 0.5 * f]
    statistics = [likelihood.loss_statistics(one) for one in outputs]
    if statistics[0] is None:
        with pytest.raises(LikelihoodError, match="give the targets together with the outputs"):
            likelihood.loss_from_statistics(f, y)
        return
    prepared = likelihood.prepare(f, y)
    found = likelihood.loss_from_statistics(torch.stack(statistics).mean(0), prepared)
    exact = torch.stack([case.dense.losses(one, y) for one in outputs]).mean(0)
    assert_close(found, exact, 1e-11)
