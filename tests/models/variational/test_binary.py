"""Weights of -1 and 1: expectations by brute force, posteriors by enumeration, refits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import engram
from engram.errors import (
    ArgumentError,
    DataError,
    LikelihoodError,
    NonFiniteError,
    TargetError,
)
from engram.likelihoods import Bernoulli, Hinge, ZeroOne
from engram.models.variational.binary import fit_binary_linear
from engram.models.variational.binary_expectations import (
    Enumerated,
    Examples,
    GaussianOutputs,
    SampledWeights,
)
from engram.models.variational.natural_gradient import fit

LOGIT = Bernoulli().expectation()


def problem(count, size, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(count, size, generator=generator, dtype=torch.float64)
    weights = torch.where(torch.rand(size, generator=generator) < 0.5, 1.0, -1.0).double()
    noise = scale * torch.randn(count, generator=generator, dtype=torch.float64)
    return inputs, torch.sign(inputs @ weights + noise)


def expected_by_hand(loss, inputs, targets, mean):
    """Sum over all weights of probability times loss, one vector at a time."""
    total = torch.zeros(len(inputs), dtype=torch.float64)
    for signs in itertools.product([-1.0, 1.0], repeat=len(mean)):
        w = torch.tensor(signs, dtype=torch.float64)
        probability = ((1 + mean * w) / 2).prod()
        total = total + probability * loss.pointwise((inputs @ w)[:, None], targets[:, None])
    return total


@pytest.mark.parametrize("loss", [Hinge(), Hinge(margin=0.0), ZeroOne(), LOGIT], ids=repr)
def test_enumeration_is_brute_force_differentiated(loss):
    inputs, targets = problem(4, 5, 0.6)
    natural = torch.tensor([0.3, -1.2, 0.0, 2.0, -0.4], dtype=torch.float64)
    examples = Examples(inputs, targets[:, None], loss)
    mean = natural.tanh()

    def by_hand(mu):
        return expected_by_hand(loss, inputs, targets, mu)

    gradients = torch.autograd.functional.jacobian(by_hand, mean)
    losses = Enumerated().losses(examples, natural.expand(4, 5))
    assert torch.allclose(losses, by_hand(mean), atol=1e-12)
    assert torch.allclose(Enumerated().gradients(examples, natural), gradients, atol=1e-12)
    for i in range(4):
        hessian = torch.autograd.functional.hessian(lambda mu, i=i: by_hand(mu)[i], mean)
        found = Enumerated().hessians(examples, natural)[i]
        assert torch.allclose(found, hessian, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "way", "accuracy"),
    [
        (Hinge(), GaussianOutputs(), 0.06),
        (LOGIT, GaussianOutputs(), 0.01),
        (ZeroOne(), GaussianOutputs(), 0.15),  # a jump sees that ten coins are not quite normal
        (Hinge(), SampledWeights(2048), 0.1),
        (LOGIT, SampledWeights(2048), 0.1),
        (ZeroOne(), SampledWeights(2048), 0.15),
    ],
)
def test_the_other_expectations_come_close(loss, way, accuracy):
    inputs, targets = problem(10, 10, 0.4)
    examples = Examples(inputs, targets[:, None], loss)
    natural = 0.5 * torch.randn(10, generator=torch.Generator().manual_seed(5)).double()
    expanded = natural.expand(10, 10)
    for name, arguments in (("losses", expanded), ("gradients", natural), ("hessians", natural)):
        if name == "hessians" and isinstance(way, SampledWeights):
            way = SampledWeights(512)  # a matrix for each draw
        exact = getattr(Enumerated(), name)(examples, arguments)
        close = getattr(way, name)(examples, arguments)
        bound = accuracy * (4 if name == "hessians" else 1)
        assert (close - exact).norm() < bound * exact.norm(), name


def test_linear_loss_is_exact_by_enumerating_the_posterior():
    """A hinge that is always active is linear: then the posterior factorises and all is exact."""
    inputs, targets = problem(12, 4, 0.5)
    loss = Hinge(margin=50.0)
    fitted = fit_binary_linear(inputs, targets, loss, prior_natural=0.2)
    all_weights = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=torch.float64)

    def exact_means(kept):
        table = (50.0 - targets[kept, None] * (inputs[kept] @ all_weights.T)).sum(0)
        probability = (-table + 0.2 * all_weights.sum(1)).softmax(0)
        return probability @ all_weights

    everything = torch.arange(12)
    assert torch.allclose(fitted.mean, exact_means(everything), atol=1e-10)
    for estimator in ("linear", "response"):
        without, flagged = fitted.leave_one_out(estimator)
        assert not flagged.any()
        for i in range(12):
            assert torch.allclose(without[i].tanh(), exact_means(everything != i), atol=1e-10)
        group = fitted.remove([1, 5, 6], estimator=estimator)
        kept = torch.tensor([i for i in range(12) if i not in (1, 5, 6)])
        assert torch.allclose(group.mean, exact_means(kept), atol=1e-10)


@pytest.mark.parametrize(
    ("loss", "scale", "expectation", "size"),
    [
        (Hinge(), 0.5, "enumerated", 6),
        (Hinge(margin=0.0), 0.3, "enumerated", 6),
        (ZeroOne(), 0.5, "enumerated", 6),
        (LOGIT, 0.3, "enumerated", 6),
        (Hinge(), 0.2, "gaussian", 20),
    ],
    ids=["hinge", "perceptron", "zero-one", "logit", "hinge-gaussian"],
)
def test_leave_one_out_against_refitting(loss, scale, expectation, size):
    inputs, targets = problem(30, size, scale)
    fitted = fit_binary_linear(inputs, targets, loss, expectation=expectation)
    assert fitted.natural_gradient_length < 1e-8
    everything = torch.arange(30)
    refitted, losses = [], []
    for i in range(30):
        start = replace(fitted, examples=fitted.examples.on(everything[everything != i]))
        refitted.append(fit(start, tolerance=1e-8).natural)
        own = fitted.examples.on(torch.tensor([i]))
        losses.append(fitted.expectation.losses(own, refitted[-1][None])[0])
    truth = (inputs * (torch.stack(refitted).tanh() - fitted.mean)).sum(1)
    for estimator, accuracy in (("linear", 0.25), ("response", 0.1)):
        result = fitted.sensitivities(estimator)
        increase = torch.stack(losses) - result.loss
        guess = result.loo_loss - result.loss
        assert (result.deviation[:, 0] - truth).norm() < accuracy * truth.norm()
        assert torch.corrcoef(torch.stack([guess, increase]))[0, 1] > 0.97
        assert float(guess.sum() / increase.sum()) == pytest.approx(1, abs=accuracy)


def test_sampling_fits_and_keeps_the_random_state():
    inputs, targets = problem(20, 6, 0.5)
    before = torch.get_rng_state()
    exact = fit_binary_linear(inputs, targets, LOGIT)
    way = SampledWeights(1024, seed=3)
    sampled = fit_binary_linear(inputs, targets, LOGIT, expectation=way)
    assert torch.equal(torch.get_rng_state(), before)
    assert (sampled.mean - exact.mean).abs().max() < 0.1
    difference = sampled.sensitivities().loo_nll - exact.sensitivities().loo_nll
    assert abs(difference) < 0.05


def test_half_twice_is_whole():
    inputs, targets = problem(20, 6, 0.5)
    fitted = fit_binary_linear(inputs, targets)
    half = fitted.remove([0, 1], weights=[0.5, 0.5])
    whole = fitted.remove([0, 1])
    assert torch.allclose(2 * (half.natural - fitted.natural), whole.natural - fitted.natural)


def test_the_result_is_one_like_any_other(tmp_path):
    inputs, targets = problem(20, 6, 0.5)
    result = fit_binary_linear(inputs, targets).sensitivities("response")
    assert len(result.top(3, by="loo_loss")) == 3
    assert torch.equal(engram.load(result.save(tmp_path)).loo_loss, result.loo_loss)
    assert "Bernoulli" in repr(result)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"targets": torch.tensor([0.3, 1.0, -1.0])}, TargetError, "labels -1 and 1, or 0 and 1"),
        ({"targets": torch.ones(2)}, DataError, "3 targets, one per row"),
        ({"targets": torch.tensor([1.0, math.nan, 1.0])}, NonFiniteError, "finite targets"),
        ({"inputs": torch.full((3, 2), math.inf)}, NonFiniteError, "finite inputs"),
        ({"inputs": torch.ones(3)}, DataError, r"inputs \[N, D\]"),
        ({"inputs": torch.ones(3, 17), "expectation": "enumerated"}, ArgumentError, "at most 16"),
        ({"expectation": "exact"}, ArgumentError, "enumerated, gaussian, sampled"),
        ({"prior_natural": torch.zeros(3)}, ArgumentError, "one prior natural parameter, or 2"),
        ({"prior_natural": math.inf}, NonFiniteError, "finite prior natural"),
        ({"loss": "hing"}, LikelihoodError, "one of categorical"),
        ({"max_steps": 0}, ArgumentError, "at least 1 step"),
    ],
)
def test_bad_input(change, kind, message):
    arguments = {"inputs": torch.ones(3, 2), "targets": torch.tensor([1.0, -1.0, 1.0])} | change
    with pytest.raises(kind, match=message):
        fit_binary_linear(**arguments)


def test_what_cannot_be_removed():
    inputs, targets = problem(5, 3, 0.5)
    fitted = fit_binary_linear(inputs, targets)
    with pytest.raises(ArgumentError, match="some data to remain"):
        fitted.remove(range(5))
    with pytest.raises(ArgumentError, match="linear, response"):
        fitted.sensitivities("iterated")
    with pytest.raises(LikelihoodError, match="at least 16 samples"):
        SampledWeights(3)
