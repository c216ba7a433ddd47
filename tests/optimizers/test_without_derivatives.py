"""The exact diagonal, and losses with kinks and jumps, by VON."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError
from engram.optimizers import (
    VON,
    DiagonalOnlineNewton,
    DiagonalVON,
    Hessian,
    Reparameterised,
    ScoreFunction,
)
from worked_problems import DELTA, NUM_DATA, classes, line, logistic, network


def test_online_newton_with_the_exact_diagonal_by_hand() -> None:
    """The paper's diagonal Online Newton, both steps, on a net."""
    x, y = classes()
    model = network().double()
    x = x.double()
    optimizer = DiagonalOnlineNewton(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=DELTA,
        lr=0.3,
        precision_lr=0.2,
        initial_precision=50.0,
        curvature=Hessian(),
    )
    shapes = [p.shape for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    s = torch.full_like(theta, 50.0)

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([math.prod(shape) for shape in shapes])
        named = {n: p.reshape(shape) for n, p, shape in zip(names, parts, shapes, strict=True)}
        outputs = torch.func.functional_call(model, named, x)
        mean = nn.functional.cross_entropy(outputs, y)
        return NUM_DATA * mean + DELTA / 2 * flat.square().sum()

    for _ in range(3):
        gradient = torch.autograd.functional.jacobian(loss, theta)
        diagonal = torch.autograd.functional.hessian(loss, theta).diagonal()
        s = 0.8 * s + 0.2 * diagonal
        theta = theta - 0.3 * gradient / s
        optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(found, theta)
    kept = torch.cat([optimizer.state[p]["precision"].flatten() for p in model.parameters()])
    torch.testing.assert_close(kept, s)


def hinge(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (1 - y * model(x)).clamp(min=0).mean()


def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) * y < 0).double().mean()


def optimum(kind: str, x: Tensor, y: Tensor, precision: float, mean: Tensor) -> Tensor:
    """The minimum of E_q[sum loss] + delta/2 |m|^2 over m with S held, by closed expectations."""
    spread = x.square().sum(1, keepdim=True).sqrt() / precision**0.5
    normal = torch.distributions.Normal(torch.zeros(()).double(), torch.ones(()).double())
    m = mean.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([m], max_iter=200, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        margin = y * (x @ m)[:, None]
        if kind == "hinge":
            z = (1 - margin) / spread
            loss = spread * (z * normal.cdf(z) + normal.log_prob(z).exp())
        else:
            loss = normal.cdf(-margin / spread)
        total = loss.sum() + DELTA / 2 * m.square().sum()
        total.backward()
        return total

    optimizer.step(objective)
    return m.detach()


@pytest.mark.parametrize("structure", [VON, DiagonalVON])
@pytest.mark.parametrize("kind", ["hinge", "zero_one"])
def test_a_mean_at_a_fixed_width_goes_to_the_smoothed_minimum(kind: str, structure: type) -> None:
    """With the precision held, the fixed point is known: the posterior smooths the loss."""
    x, labels = logistic()
    y = 2 * labels - 1
    model = line(2)
    curvature = (
        Reparameterised() if (kind, structure) == ("hinge", DiagonalVON) else ScoreFunction()
    )
    precision = 20.0
    optimizer = structure(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=DELTA,
        lr=0.05,
        precision_lr=0.0,
        initial_precision=precision,
        samples=24,
        seed=2,
        curvature=curvature,
    )
    loss = hinge if kind == "hinge" else wrong
    trail = []
    for number in range(260):
        optimizer.step(lambda: loss(model, x, y))
        if number >= 100:
            trail.append(model.weight.detach()[0].clone())
    truth = optimum(kind, x, y, precision, torch.stack(trail).mean(0))
    torch.testing.assert_close(torch.stack(trail).mean(0), truth, atol=0.06, rtol=0.06)


def test_the_score_function_has_the_derivatives_of_the_expectation() -> None:
    """Over many samples: gradient and curvature of E[(x theta)^2 / 2] are x^2 m and x^2."""
    model = line(1)
    model.weight.data.fill_(0.7)
    held = {"num_data": 1, "prior_precision": 1e-6, "lr": 1.0, "initial_precision": 4.0}
    optimizer = VON(
        model.parameters(),
        **held,
        precision_lr=0.5,
        samples=9000,
        curvature=ScoreFunction(),
    )
    optimizer.step(lambda: 0.5 * (3.0 * model.weight.detach()).square().sum())
    precision = float(optimizer.state["shared"]["precision"])
    assert precision == pytest.approx(0.5 * 4 + 0.5 * 9, rel=0.1)
    assert float(model.weight) == pytest.approx(0.7 - 9 * 0.7 / precision, abs=0.1)


def test_a_small_net_learns_by_the_number_of_its_mistakes() -> None:
    """Nothing but the 0-1 loss; then sensitivities through the posterior that it has learned."""
    torch.manual_seed(0)
    x = torch.randn(80, 2)
    y = (x[:, :1] > 0).float() * 2 - 1
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = DiagonalVON(
        model.parameters(),
        num_data=80,
        prior_precision=0.5,
        lr=0.1,
        precision_lr=0.002,
        initial_precision=10.0,
        samples=16,
        curvature=ScoreFunction(),
    )
    before = float(wrong(model, x, y))
    for _ in range(150):
        optimizer.step(lambda: wrong(model, x, y))
    assert float(wrong(model, x, y)) < min(0.12, before)
    posterior = engram.posterior_of(
        optimizer, model, num_data=80, likelihood="gaussian", prior_precision=0.5
    )
    found = engram.loss_covariances(
        model, (x, y), posterior, lambda f, y: (f[:, 0] * y[:, 0] < 0).double(), samples=200
    )
    near, far = x[:, 0].abs() < 0.3, x[:, 0].abs() > 1.5
    assert found.deviation[near].abs().mean() > 2 * found.deviation[far].abs().mean()


def test_values_alone_need_samples() -> None:
    x, y = logistic()
    model = line(2)
    optimizer = DiagonalOnlineNewton(
        model.parameters(), num_data=NUM_DATA, prior_precision=DELTA, curvature=ScoreFunction()
    )
    with pytest.raises(ArgumentError, match="use VON or DiagonalVON"):
        optimizer.step(lambda: wrong(model, x, y))
