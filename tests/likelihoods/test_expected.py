"""Expected losses against integration, differentiation and sampling."""

from __future__ import annotations

import math

import pytest
import torch

from engram.errors import LikelihoodError, TargetError
from engram.likelihoods import (
    Absolute,
    Bernoulli,
    ExpectedCategorical,
    ExpectedGaussian,
    Gamma,
    Gaussian,
    Hinge,
    NegativeBinomial,
    Poisson,
    Quadrature,
    Quantile,
    Sampled,
    ZeroOne,
    expected_loss,
    from_loss,
)

SCALAR = {
    "hinge": (Hinge(), [-1.0, 1.0]),
    "zero_one": (ZeroOne(), [-1.0, 1.0]),
    "absolute": (Absolute(), [-0.7, 1.2]),
    "quantile": (Quantile(0.85), [-0.7, 1.2]),
    "gaussian": (Gaussian(0.3).expectation(), [-0.7, 1.2]),
    "gaussian by quadrature": (Quadrature(Gaussian(0.3)), [-0.7, 1.2]),
    "logit": (Bernoulli().expectation(), [0.0, 1.0]),
    "probit": (Bernoulli("probit").expectation(), [0.0, 1.0]),
    "cloglog": (Bernoulli("cloglog").expectation(), [0.0, 1.0]),
    "log_poisson": (Poisson().expectation(), [0.0, 3.0]),
    "softplus_poisson": (Poisson("softplus").expectation(), [0.0, 3.0]),
    "gamma": (Gamma(dispersion=0.5).expectation(), [0.4, 1.2]),
    "negative_binomial": (NegativeBinomial(0.7).expectation(), [0.0, 3.0]),
}
KINKED = ("hinge", "zero_one", "absolute", "quantile")


def cases(name):
    """Means, variances and targets on a grid, [N, 1] each."""
    loss, values = SCALAR[name]
    grid = torch.cartesian_prod(
        torch.linspace(-2, 2, 9, dtype=torch.float64),
        torch.tensor([0.05, 0.6, 1.7], dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
    )
    mean, variance, targets = (column[:, None] for column in grid.T)
    return loss, mean, variance, targets


def integrate(loss, mean, variance, targets, of=lambda value: value):
    """E[of(loss)] by the trapezoid rule on a fine grid."""
    z = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    rows = [
        torch.trapezoid(
            density * of(loss.pointwise((m + v.sqrt() * z)[:, None], y.expand(len(z), 1))), z
        )
        for m, v, y in zip(mean, variance, targets, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("name", SCALAR)
def test_expected_loss_is_the_integral(name):
    loss, mean, variance, targets = cases(name)
    truth = integrate(loss, mean, variance, targets)
    # the trapezoid rule itself is good to a step of 1e-3 times the jump
    accuracy = 1e-3 if name == "zero_one" else 1e-6
    assert torch.allclose(loss.loss(mean, variance, targets), truth, atol=accuracy, rtol=1e-6)


@pytest.mark.parametrize("name", SCALAR)
def test_derivatives_are_those_of_the_expected_loss(name):
    """e = dE/dm, beta = d2E/dm2 = 2 dE/dv, by differentiating the expectation itself."""
    loss, mean, variance, targets = cases(name)
    m, v = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    first, by_variance = torch.autograd.grad(loss.loss(m, v, targets).sum(), (m, v))
    step = 1e-5
    above = loss.residual(mean + step, variance, targets)
    second = (above - loss.residual(mean - step, variance, targets)) / (2 * step)
    curvature = loss.curvature(mean, variance, targets)
    assert torch.allclose(loss.residual(mean, variance, targets), first, atol=1e-10)
    assert torch.allclose(curvature, second, atol=1e-7)
    assert torch.allclose(curvature, 2 * by_variance, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in SCALAR if name not in KINKED])
def test_predictive_loss_is_the_log_of_the_integral(name):
    loss, mean, variance, targets = cases(name)
    truth = -integrate(loss, mean, variance, targets, lambda value: torch.exp(-value)).log()
    assert torch.allclose(loss.predictive_loss(mean, variance, targets), truth, atol=1e-6)


@pytest.mark.parametrize("name", KINKED)
def test_sampling_agrees_with_the_closed_form(name):
    closed, mean, variance, targets = cases(name)
    sampled = Sampled(closed.pointwise, num_samples=2**13)
    for quantity, accuracy in (("loss", 2e-3), ("residual", 0.01), ("curvature", 0.06)):
        answer = getattr(closed, quantity)(mean, variance, targets)
        estimate = getattr(sampled, quantity)(mean, variance, targets)
        scale = answer.abs().amax()
        assert (estimate - answer).abs().max() < accuracy * scale, quantity


def test_sampling_several_outputs_and_the_seed():
    """A loss that couples two outputs; its smooth version is known: the mean of two absolutes."""
    mean = torch.tensor([[0.3, -0.2], [1.0, 0.4]], dtype=torch.float64)
    variance = torch.tensor([[0.5, 1.0], [0.2, 0.7]], dtype=torch.float64)
    targets = torch.zeros(2, 2, dtype=torch.float64)
    sampled = Sampled(lambda f, y: (f - y).abs().mean(1), num_samples=2**13)
    truth = torch.cat(
        [Absolute().residual(mean[:, [k]], variance[:, [k]], targets[:, [k]]) / 2 for k in (0, 1)],
        dim=1,
    )
    before = torch.get_rng_state()
    assert torch.allclose(sampled.residual(mean, variance, targets), truth, atol=5e-3)
    assert torch.equal(torch.get_rng_state(), before)
    again = Sampled(sampled.function, num_samples=2**13).residual(mean, variance, targets)
    other = Sampled(sampled.function, num_samples=2**13, seed=1).residual(mean, variance, targets)
    assert torch.equal(again, sampled.residual(mean, variance, targets))
    assert not torch.equal(again, other)


@pytest.mark.parametrize("mixed", [False, True])
def test_softmax_derivatives(mixed):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(4, 3, generator=generator, dtype=torch.float64) if mixed else None
    loss = ExpectedCategorical(mixing, num_samples=512)
    mean = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(5, 3, generator=generator, dtype=torch.float64) + 0.1
    targets = torch.tensor([0, 1, 2, 1, 0])
    leaf = mean.clone().requires_grad_()
    first = torch.autograd.grad(loss.loss(leaf, variance, targets).sum(), leaf)[0]
    assert torch.allclose(loss.residual(mean, variance, targets), first, atol=1e-12)
    curvature = loss.curvature(mean, variance, targets)
    for k in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[k] = 1e-5
        above = loss.residual(mean + step, variance, targets)
        below = loss.residual(mean - step, variance, targets)
        assert torch.allclose(curvature[:, k], ((above - below) / 2e-5)[:, k], atol=1e-8)
    assert torch.allclose(
        loss.prediction(mean, variance).sum(1), torch.ones(5, dtype=torch.float64)
    )


def test_labels_zero_and_one_are_signs():
    mean = torch.zeros(2, 1)
    assert Hinge().prepare(mean, torch.tensor([0, 1])).tolist() == [[-1.0], [1.0]]
    assert Bernoulli().expectation().prepare(mean, torch.tensor([-1, 1])).tolist() == [[0.0], [1.0]]


def test_independent_outputs_are_averaged_one_by_one():
    """Two outputs at once are two losses of one output each, for every loss of independent ones."""
    mean = torch.tensor([[0.3, -0.2], [1.0, 0.4]], dtype=torch.float64)
    variance = torch.tensor([[0.5, 1.0], [0.2, 0.7]], dtype=torch.float64)
    targets = torch.ones(2, 2, dtype=torch.float64)
    for loss, _ in SCALAR.values():
        for quantity in ("loss", "predictive_loss", "residual", "curvature"):
            both = getattr(loss, quantity)(mean, variance, targets)
            each = [
                getattr(loss, quantity)(mean[:, [k]], variance[:, [k]], targets[:, [k]])
                for k in (0, 1)
            ]
            summed = each[0] + each[1] if both.dim() == 1 else torch.cat(each, 1)
            assert torch.allclose(both, summed, rtol=1e-12)


def test_soft_targets_weigh_the_classes():
    loss, mean, variance = ExpectedCategorical(), torch.zeros(1, 3), torch.ones(1, 3)
    hard = [loss.loss(mean, variance, torch.tensor([k])) for k in range(3)]
    soft = loss.loss(mean, variance, torch.tensor([[0.5, 0.25, 0.25]]))
    assert torch.allclose(soft, 0.5 * hard[0] + 0.25 * hard[1] + 0.25 * hard[2])


def test_every_likelihood_is_averaged_and_a_loss_of_ones_own_by_sampling():
    assert repr(expected_loss(Bernoulli("probit"))) == "expected Bernoulli(link=probit)"
    assert repr(expected_loss("probit")) == "expected Bernoulli(link=probit)"
    squared = from_loss(lambda f, y: (f[:, 0] - y[:, 0]).square())
    assert isinstance(squared.expectation(), Sampled)


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (Hinge(), [0.5, 1.0], "labels -1 and 1, or 0 and 1"),
        (ZeroOne(), [-1.0, 0.0], "labels -1 and 1, or 0 and 1"),
        (Poisson("softplus").expectation(), [-1.0, 2.0], "poisson targets that are not negative"),
        (Bernoulli().expectation(), [-1.0, 0.0], "labels -1 and 1, or 0 and 1"),
        (Bernoulli().expectation(), [2.0, 0.0], "bernoulli targets that are between 0 and 1"),
        (Absolute(), [1.0], r"absolute targets of the outputs' shape \(2, 1\)"),
        (Quantile(0.5), [1.0, math.nan], "finite quantile targets"),
        (ExpectedCategorical(), [0.0, 1.0], "at least 2 outputs"),
        (Sampled(lambda f, y: f[:, 0]), [1.0, 2.0, 3.0], "2 targets, one per example"),
    ],
)
def test_targets_outside_the_support(loss, targets, message):
    with pytest.raises(TargetError, match=message):
        loss.prepare(torch.zeros(2, 1), torch.tensor(targets))


def test_class_numbers_outside():
    with pytest.raises(TargetError, match="class numbers from 0 to 2"):
        ExpectedCategorical().prepare(torch.zeros(2, 3), torch.tensor([0, 3]))
    with pytest.raises(TargetError, match="3 latent outputs"):
        ExpectedCategorical(torch.zeros(4, 3)).prepare(torch.zeros(2, 2), torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantile(1.0), "a level between 0 and 1"),
        (lambda: Sampled(lambda f, y: f[:, 0], num_samples=4), "at least 16 samples"),
        (lambda: ExpectedCategorical(num_samples=2), "at least 16 samples"),
        (lambda: Quadrature(Bernoulli(), num_points=3), "at least 8 quadrature points"),
        (lambda: expected_loss("hing"), "one of categorical, bernoulli"),
        (
            lambda: Sampled(lambda f, y: f.sum()).prepare(torch.zeros(2, 1), torch.zeros(2)),
            "one loss per example",
        ),
        (
            lambda: ExpectedGaussian(-1.0).prepare(torch.zeros(2, 1), torch.zeros(2)),
            "positive noise variances",
        ),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(LikelihoodError, match=message):
        make()
