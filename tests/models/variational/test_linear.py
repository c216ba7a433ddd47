"""A variational linear model: ridge regression, refits of the smoothed objective, bad input."""

from __future__ import annotations

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
    PosteriorError,
    TargetError,
)
from engram.likelihoods import (
    Absolute,
    Bernoulli,
    ExpectedBernoulli,
    ExpectedGaussian,
    Hinge,
    Poisson,
    Quadrature,
    Quantile,
    Sampled,
    ZeroOne,
)
from engram.models.variational.linear import fit_variational_linear
from engram.models.variational.natural_gradient import fit

N, D = 60, 4


def problem(kind):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(N, D, generator=generator, dtype=torch.float64)
    f = inputs @ torch.randn(D, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    if kind == "label":
        return inputs, torch.sign(f + 0.8 * noise)
    if kind == "count":
        return inputs, torch.poisson((0.5 * f).exp(), generator=generator)
    heavy = noise / torch.rand(N, generator=generator, dtype=torch.float64).sqrt()
    return inputs, f + 0.4 * heavy


def refits(fitted, chosen):
    """The posterior fitted again without each, from the removed precision; outputs and losses."""
    everything, moved, losses = torch.arange(N), [], []
    for i in chosen:
        start = replace(fitted.remove([i]).on(everything[everything != i]), mean=fitted.mean)
        without = fit(start, tolerance=1e-8)
        own = replace(fitted, mean=without.mean, precision=without.precision).on(torch.tensor([i]))
        moved.append(own.marginals.mean[0, 0] - fitted.marginals.mean[i, 0])
        total = own.marginals.total_variance
        losses.append(own.loss.predictive_loss(own.marginals.mean, total, own.targets)[0])
    return torch.stack(moved), torch.stack(losses)


# Loss, targets, and the relative error allowed to the estimators corrected and response. The 0-1
# loss is not convex: its curvature changes sign, and what is linearised here goes less far.
CASES = {
    "hinge": (Hinge(), "label", 0.1, 0.06),
    "perceptron": (Hinge(margin=0.0), "label", 0.25, 0.1),
    "zero_one": (ZeroOne(), "label", 0.35, 0.35),
    "absolute": (Absolute(), "number", 0.1, 0.05),
    "quantile": (Quantile(0.8), "number", 0.1, 0.05),
    "logit": (ExpectedBernoulli(Bernoulli(), num_points=24), "label", 0.05, 0.02),
    "poisson": (Quadrature(Poisson(), num_points=24), "count", 0.05, 0.02),
}


@pytest.mark.parametrize("name", CASES)
def test_leave_one_out_against_refitting_the_smoothed_objective(name):
    loss, kind, *accuracies = CASES[name]
    inputs, targets = problem(kind)
    fitted = fit_variational_linear(inputs, targets, loss)
    assert fitted.natural_gradient_length < 1e-9
    chosen = list(range(0, N, 2))
    truth, losses = refits(fitted, chosen)
    for estimator, accuracy in zip(("corrected", "response"), accuracies, strict=True):
        result = fitted.sensitivities(estimator)
        guess = result.deviation[chosen, 0]
        increase, estimate = losses - result.loss[chosen], (result.loo_loss - result.loss)[chosen]
        together = {"zero_one": 0.94, "perceptron": 0.97}.get(name, 0.98)
        assert (guess - truth).norm() < accuracy * truth.norm()
        assert torch.corrcoef(torch.stack([guess, truth]))[0, 1] > together
        assert torch.corrcoef(torch.stack([estimate, increase]))[0, 1] > together
        assert float(estimate.sum() / increase.sum()) == pytest.approx(1, abs=max(accuracy, 0.1))


@pytest.mark.parametrize(
    ("loss", "accuracy"),
    [(ZeroOne(), 0.15), (Hinge(margin=0.0), 0.06), (ExpectedBernoulli(Bernoulli(), 24), 0.03)],
    ids=repr,
)
def test_response_is_right_to_first_order(loss, accuracy):
    """One copy among fifty of the same example is a small perturbation."""
    inputs, targets = problem("label")
    inputs, targets = inputs[:8].repeat(50, 1), targets[:8].repeat(50)
    fitted = fit_variational_linear(inputs, targets, loss, prior_precision=5.0)
    left, others = fitted.leave_one_out("response"), torch.arange(len(inputs))
    for i in (0, 3, 6):
        without = fit(fitted.on(others[others != i]), tolerance=1e-9)
        truth = inputs[i] @ (without.mean - fitted.mean)[0]
        spread = inputs[i] @ torch.linalg.inv(without.precision[0]) @ inputs[i]
        before = fitted.marginals.variance[i, 0]
        assert float(left.deviation[i, 0]) == pytest.approx(float(truth), rel=accuracy)
        assert float(left.variance[i, 0] - before) == pytest.approx(
            float(spread - before), rel=accuracy
        )


def test_response_is_corrected_where_nothing_responds():
    inputs, targets = problem("number")
    fitted = fit_variational_linear(inputs, targets, "gaussian")
    response, corrected = fitted.sensitivities("response"), fitted.sensitivities("corrected")
    assert torch.allclose(response.deviation, corrected.deviation, atol=1e-8)
    assert torch.allclose(response.loo_loss, corrected.loo_loss, atol=1e-8)


def test_gaussian_noise_is_ridge_regression():
    inputs, targets = problem("number")
    fitted = fit_variational_linear(inputs, targets, ExpectedGaussian(0.3), prior_precision=2.0)

    def ridge(kept):
        x, y = inputs[kept], targets[kept]
        precision = x.T @ x / 0.3 + 2.0 * torch.eye(D, dtype=torch.float64)
        return torch.linalg.solve(precision, x.T @ y / 0.3), precision

    everything = torch.arange(N)
    mean, precision = ridge(everything)
    assert torch.allclose(fitted.mean[0], mean, atol=1e-10)
    assert torch.allclose(fitted.precision[0], precision, atol=1e-9)
    result = fitted.sensitivities()
    for i in (0, 7, 33):
        without, _ = ridge(everything[everything != i])
        moved = result.outputs[i, 0] + result.deviation[i, 0]
        assert torch.allclose(moved, inputs[i] @ without, atol=1e-10)
    without, precision = ridge(everything[20:])
    removed = fitted.remove(range(20))
    assert torch.allclose(removed.mean[0], without, atol=1e-10)
    assert torch.allclose(removed.precision[0], precision, atol=1e-9)


def test_objective_is_minimal_where_it_stops():
    """No other mean or precision nearby has a lower objective."""
    inputs, targets = problem("label")
    fitted = fit_variational_linear(inputs, targets, "hinge")
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        step = 0.05 * torch.randn(1, D, generator=generator, dtype=torch.float64)
        scale = 1 + 0.1 * torch.randn(1, generator=generator, dtype=torch.float64)
        other = replace(fitted, mean=fitted.mean + step, precision=scale.abs() * fitted.precision)
        assert other.objective > fitted.objective


def test_deviation_of_the_weights_is_the_equation():
    inputs, targets = problem("label")
    fitted = fit_variational_linear(inputs, targets, "hinge")
    moved = fitted.mean_deviations([3, 5])[:, 0]
    residual = fitted.marginals.residual[[3, 5]]
    assert torch.allclose(
        moved, torch.linalg.solve(fitted.precision[0], (inputs[[3, 5]] * residual).T).T
    )
    linear = fitted.sensitivities("linear")
    assert torch.allclose(linear.deviation[[3, 5], 0], (inputs[[3, 5]] * moved).sum(1))
    one = fitted.remove([3])
    own = fitted.sensitivities("corrected").deviation[3, 0]
    assert torch.allclose(inputs[3] @ (one.mean - fitted.mean)[0], own)


def test_a_sampled_loss_leads_where_the_closed_form_does():
    inputs, targets = problem("label")
    closed = fit_variational_linear(inputs, targets, "hinge")
    function = Sampled(Hinge().pointwise, num_samples=2**11)
    sampled = fit_variational_linear(inputs, targets, function, tolerance=1e-3)
    assert torch.allclose(sampled.mean, closed.mean, atol=0.03)
    left, right = sampled.sensitivities(), closed.sensitivities()
    assert torch.allclose(left.deviation, right.deviation, atol=0.03)
    assert left.loo_nll == pytest.approx(right.loo_nll, rel=0.02)


def test_the_result_is_one_like_any_other(tmp_path):
    inputs, targets = problem("label")
    result = fit_variational_linear(inputs.float(), targets, "hinge").sensitivities()
    assert len(result.top(5)) == 5
    assert torch.equal(engram.load(result.save(tmp_path)).score, result.score)
    assert result.diagnostics.relative_gradient < 1e-4


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"targets": torch.tensor([0.3, 1.0, -1.0])}, TargetError, "labels -1 and 1, or 0 and 1"),
        ({"targets": torch.ones(2)}, DataError, "3 targets, one per row"),
        ({"inputs": torch.full((3, 2), math.nan)}, NonFiniteError, "finite inputs"),
        ({"inputs": torch.ones(3, 2).long()}, DataError, "floating-point inputs"),
        ({"prior_precision": 0.0}, ArgumentError, "a positive prior precision"),
        ({"loss": "svm"}, LikelihoodError, "one of categorical"),
        ({"max_steps": 0}, ArgumentError, "at least 1 step"),
    ],
)
def test_bad_input(change, kind, message):
    arguments = {"inputs": torch.ones(3, 2), "targets": torch.tensor([1.0, -1.0, 1.0])} | change
    with pytest.raises(kind, match=message):
        fit_variational_linear(**arguments)


def test_what_cannot_be_removed():
    inputs, targets = problem("label")
    fitted = fit_variational_linear(inputs, targets, "hinge")
    with pytest.raises(ArgumentError, match="some data to remain"):
        fitted.remove(range(N))
    with pytest.raises(PosteriorError, match="more was taken out"):
        fitted.remove(range(40), weights=[9.0] * 40)


def test_too_few_steps_are_said():
    inputs, targets = problem("label")
    with pytest.warns(UserWarning, match="natural gradient is still"):
        fit_variational_linear(inputs, targets, "hinge", max_steps=2)
