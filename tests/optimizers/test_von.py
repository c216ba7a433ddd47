"""VON against draws replayed by hand and the variational optimum found by quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import engram
from engram.errors import ArgumentError
from engram.optimizers import VON, DiagonalVON, GaussNewton, Reparameterised
from worked_problems import (
    DELTA,
    NUM_DATA,
    binary,
    line,
    logistic,
    logistic_derivatives,
    ridge,
    ridge_solution,
    squared,
)

EYE = torch.eye(2, dtype=torch.float64)
SAMPLES, SEED = 3, 7


def noise(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.stack(
        [torch.randn(2, generator=generator, dtype=torch.float64) for _ in range(count)]
    )


@pytest.mark.parametrize("curvature", [None, GaussNewton("bernoulli")], ids=["hessian", "ggn"])
def test_full_steps_by_hand(curvature) -> None:
    x, y = logistic()
    model = line(2)
    optimizer = VON(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=DELTA,
        lr=0.4,
        precision_lr=0.2,
        initial_precision=6.0,
        samples=SAMPLES,
        seed=SEED,
        curvature=curvature,
    )
    closure = binary(model, x, y) if curvature is None else lambda: (model(x), y)
    mean, precision = model.weight.detach()[0].clone(), 6.0 * EYE
    draws = noise(4 * SAMPLES).split(SAMPLES)
    for white in draws:
        root = torch.linalg.cholesky(precision)
        thetas = [mean + torch.linalg.inv(root).mT @ e for e in white]
        found = [logistic_derivatives(t, x, y) for t in thetas]
        gradient = torch.stack([g for g, _ in found]).mean(0) + DELTA * mean
        curve = torch.stack([h for _, h in found]).mean(0) + DELTA * EYE
        precision = 0.8 * precision + 0.2 * curve
        mean = mean - 0.4 * torch.linalg.solve(precision, gradient)
        optimizer.step(closure)
        torch.testing.assert_close(model.weight.detach()[0], mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(optimizer.state["shared"]["precision"], precision)


def test_diagonal_steps_with_the_reparameterisation_trick_by_hand() -> None:
    x, y = logistic()
    model = line(2)
    optimizer = DiagonalVON(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=DELTA,
        lr=0.3,
        precision_lr=0.01,
        initial_precision=20.0,
        samples=SAMPLES,
        seed=SEED,
        curvature=Reparameterised(),
    )
    mean, precision = model.weight.detach()[0].clone(), torch.full((2,), 20.0).double()
    for white in noise(4 * SAMPLES).split(SAMPLES):
        steps = [e / precision.sqrt() for e in white]
        gradients = [logistic_derivatives(mean + s, x, y)[0] for s in steps]
        pairs = zip(gradients, steps, strict=True)
        curve = torch.stack([g * precision * s for g, s in pairs]).mean(0) + DELTA
        precision = 0.99 * precision + 0.01 * curve
        gradient = torch.stack(gradients).mean(0) + DELTA * mean
        mean = mean - 0.3 * gradient / precision
        optimizer.step(binary(model, x, y))
        torch.testing.assert_close(model.weight.detach()[0], mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(optimizer.state[model.weight]["precision"][0], precision)


def test_ridge_regression_has_the_exact_precision_and_the_mean_on_average() -> None:
    x, y = ridge()
    model = line(3)
    optimizer = VON(
        model.parameters(), num_data=NUM_DATA, prior_precision=DELTA, lr=0.05, samples=4
    )
    means = []
    for number in range(300):
        optimizer.step(squared(model, x, y))
        if number >= 100:
            means.append(model.weight.detach()[0].clone())
    solution, hessian = ridge_solution(x, y)
    torch.testing.assert_close(optimizer.state["shared"]["precision"], hessian)
    torch.testing.assert_close(torch.stack(means).mean(0), solution, rtol=0, atol=0.01)


def expectations(mean: Tensor, precision: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """E_q of the gradient and the Hessian by Gauss-Hermite quadrature over each logit."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    node, weight = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    variance = torch.einsum("np,pq,nq->n", x, torch.linalg.inv(precision), x)
    logits = (x @ mean)[:, None] + variance.sqrt()[:, None] * node
    probability = torch.sigmoid(logits)
    error = (probability * weight).sum(1) - y[:, 0]
    curve = (probability * (1 - probability) * weight).sum(1)
    return x.mT @ error + DELTA * mean, x.mT @ (curve[:, None] * x) + DELTA * EYE


def variational_optimum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mean, precision = torch.zeros(2, dtype=torch.float64), 10.0 * EYE
    for _ in range(500):
        gradient, hessian = expectations(mean, precision, x, y)
        precision = 0.5 * precision + 0.5 * hessian
        mean = mean - 0.5 * torch.linalg.solve(precision, gradient)
    gradient, hessian = expectations(mean, precision, x, y)
    assert gradient.norm() < 1e-10
    torch.testing.assert_close(precision, hessian)
    return mean, precision


def test_logistic_regression_tends_to_the_variational_optimum() -> None:
    x, y = logistic()
    mean, precision = variational_optimum(x, y)
    model = line(2)
    optimizer = VON(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=DELTA,
        lr=0.3,
        precision_lr=0.3,
        samples=20,
        curvature=GaussNewton("bernoulli"),
    )
    for number in range(110):
        for group in optimizer.param_groups:  # forgets the start, then averages over the draws
            group["lr"] = group["precision_lr"] = 0.3 / (1 + 0.3 * max(number - 20, 0))
        optimizer.step(lambda: (model(x), y))
    got = optimizer.state["shared"]["precision"]
    assert (got - precision).norm() / precision.norm() < 0.01
    off = model.weight.detach()[0] - mean
    assert float(off @ precision @ off) ** 0.5 < 0.05  # in posterior standard deviations
    read = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    torch.testing.assert_close(read.mean["weight"], model.weight.detach())
    dense = read.multiply({"weight": EYE.reshape(2, 1, 2)})["weight"].reshape(2, 2)
    torch.testing.assert_close(dense, got)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="number of samples from 1"):
        VON(line(2).parameters(), num_data=3, prior_precision=1.0, samples=0)
