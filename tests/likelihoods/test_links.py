"""Links against differentiation, and likelihoods with other links as any other likelihood."""

import numpy as np
import pytest
import torch

from engram import likelihoods
from engram.likelihoods.draws import Draws
from engram.likelihoods.links import LINKS
from engram.likelihoods.remembered import Remembered, described, restored

OTHERS = {
    "probit": (likelihoods.Bernoulli("probit"), [0.0, 1.0, 0.3]),
    "softplus": (likelihoods.Poisson("softplus"), [0.0, 4.0, 1.0]),
    "gamma": (likelihoods.Gamma(dispersion=0.4), [0.2, 4.0, 1.0]),
    "negative_binomial": (likelihoods.NegativeBinomial(0.7), [0.0, 4.0, 1.0]),
    "tweedie": (likelihoods.Tweedie(1.6, dispersion=2.0), [0.0, 4.0, 1.0]),
    "gaussian": (likelihoods.Gaussian(0.3, link="log"), [0.1, 4.0, -1.0]),
}


def assert_close(left, right, tolerance=1e-8):
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_links(link):
    mean = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    eta = link.predictor(mean).clone().requires_grad_()
    assert_close(link.mean(eta).detach(), mean)
    slope = torch.autograd.grad(link.mean(eta).sum(), eta, create_graph=True)[0]
    assert_close(link.slope(eta).detach(), slope.detach())
    bend = torch.zeros_like(mean)
    if slope.requires_grad:
        bend = torch.autograd.grad(slope.sum(), eta)[0] / slope
    assert_close(link.bend(eta).detach(), bend.detach())
    assert_close(link.rise(eta).detach(), (slope / mean).detach())
    assert_close(link.fall(eta).detach(), (slope / (1 - mean)).detach())
    assert_close(link.log_mean(eta).detach(), mean.log())
    assert_close(link.log_complement(eta).detach(), torch.log1p(-mean))


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_losses_stay_finite_far_out(link):
    response = likelihoods.Bernoulli(link)
    eta = torch.tensor([-30.0, 30.0, -30.0, 30.0], dtype=torch.float64)
    targets = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    for value in (response.kernel, response.residual, response.unit_curvature):
        assert torch.isfinite(value(eta, targets)).all()


@pytest.mark.parametrize("name", OTHERS)
def test_two_outputs_have_the_derivatives_of_their_loss(name):
    likelihood, values = OTHERS[name]
    outputs = torch.tensor([[0.2, -1.0], [0.7, 0.1], [-0.4, 1.3]], dtype=torch.float64)
    column = torch.tensor(values, dtype=torch.float64)
    targets = likelihood.prepare(outputs, torch.stack([column, column.flip(0)], 1))
    leaf = outputs.clone().requires_grad_()
    first = torch.autograd.grad(likelihood.loss(leaf, targets).sum(), leaf, create_graph=True)[0]
    assert_close(likelihood.residual(outputs, targets), first.detach())
    ones = torch.ones_like(outputs)
    second = torch.autograd.grad(first.sum(), leaf)[0]
    assert_close(likelihood.hessian_times(outputs, targets, ones), second)
    factor = likelihood.hessian_factor(outputs, targets)
    drawn = torch.stack(
        [
            likelihood.sampled_residual(outputs, targets, Draws(seed, torch.arange(3)))
            for seed in range(4000)
        ]
    )
    error = (drawn.square().mean(0) - factor.square().sum(2)).abs()
    assert (error <= 5 * drawn.square().std(0) / 4000**0.5 + 1e-9).all()


@pytest.mark.parametrize("name", OTHERS)
def test_they_are_made_again_from_what_is_saved(name):
    likelihood = OTHERS[name][0]
    again = restored(described(likelihood))
    assert type(again) is type(likelihood)
    assert again.identity == likelihood.identity == repr(likelihood)
    expected = likelihood.at(likelihood.dispersion, expected_hessian=True)
    assert isinstance(restored(described(expected)), Remembered)
    assert expected.identity != likelihood.identity
