"""Diagonal Online Newton against Jacobians and Hessians written out densely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import engram
from engram.errors import ArgumentError, PosteriorError
from engram.optimizers import (
    DiagonalOnlineNewton,
    DiagonalVON,
    GaussNewton,
    Hutchinson,
    Reparameterised,
)
from worked_problems import DELTA, NUM_DATA, classes, network


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def outputs_at(model: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    named = dict(model.named_parameters())
    parts = theta.split([p.numel() for p in named.values()])
    values = {n: v.view(p.shape) for (n, p), v in zip(named.items(), parts, strict=True)}
    return functional_call(model, values, (x,))


def dense(model: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, Gauss-Newton matrix and Hessian of the mean cross-entropy."""

    def loss(t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs_at(model, t, x), y)

    jacobian = jacrev(lambda t: outputs_at(model, t, x))(theta)
    p = outputs_at(model, theta, x).softmax(1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    ggn = torch.einsum("bkp,bkl,blq->pq", jacobian, middle, jacobian) / len(x)
    return jacrev(loss)(theta), ggn, hessian(loss)(theta)


def diagonal_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensor:
    return torch.cat([optimizer.state[p]["precision"].flatten() for p in model.parameters()])


def test_exact_gauss_newton_by_hand_for_a_few_minibatches() -> None:
    x, y = classes()
    model = network()
    optimizer = DiagonalOnlineNewton(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=DELTA,
        lr=0.2,
        precision_lr=0.3,
        initial_precision=5.0,
        curvature=GaussNewton("categorical"),
    )
    theta, precision = flat(model), torch.full_like(flat(model), 5.0)
    for number in range(4):
        xs, ys = x[8 * number : 8 * number + 8], y[8 * number : 8 * number + 8]
        gradient, ggn, _ = dense(model, theta, xs, ys)
        precision = 0.7 * precision + 0.3 * (NUM_DATA * ggn.diagonal() + DELTA)
        theta = theta - 0.2 * (NUM_DATA * gradient + DELTA * theta) / precision
        optimizer.step(lambda xs=xs, ys=ys: (model(xs), ys))
        torch.testing.assert_close(flat(model), theta, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(diagonal_of(optimizer, model), precision)
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    ones = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    got = torch.cat([v.flatten() for v in posterior.multiply(ones).values()])
    torch.testing.assert_close(got, precision)
    assert posterior.prior_precision == DELTA


@pytest.mark.parametrize(
    ("curvature", "which"), [(GaussNewton("categorical", probes=4000), 1), (Hutchinson(4000), 2)]
)
def test_random_probes_have_the_dense_diagonal_as_their_mean(curvature, which: int) -> None:
    x, y = classes()
    model = network()
    optimizer = DiagonalOnlineNewton(
        model.parameters(),
        num_data=1,
        prior_precision=2.0,
        lr=0.0,
        precision_lr=1.0,
        curvature=curvature,
    )
    expected = dense(model, flat(model), x, y)[which].diagonal()

    def closure() -> object:
        if which == 1:
            return model(x), y
        return nn.functional.cross_entropy(model(x), y)

    optimizer.step(closure)
    error = (diagonal_of(optimizer, model) - 2.0 - expected).norm() / expected.norm()
    assert error < 0.05


def test_hutchinson_is_exact_for_a_diagonal_hessian_and_stops_at_the_optimum() -> None:
    curvatures = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)
    target = torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = DiagonalOnlineNewton([parameter], num_data=10, prior_precision=DELTA, lr=0.5)
    for _ in range(300):
        optimizer.step(lambda: 0.5 * (curvatures * (parameter - target) ** 2).sum())
    precision = 10 * curvatures + DELTA
    torch.testing.assert_close(optimizer.state[parameter]["precision"], precision)
    torch.testing.assert_close(parameter.detach(), 10 * curvatures * target / precision)


def test_a_precision_that_would_turn_negative_is_an_error_and_changes_nothing() -> None:
    parameter = nn.Parameter(torch.tensor([0.1], dtype=torch.float64))
    optimizer = DiagonalOnlineNewton(
        [parameter], num_data=10, prior_precision=0.1, precision_lr=0.9
    )
    with pytest.raises(PosteriorError, match=r"positive, finite precision.*GaussNewton"):
        optimizer.step(lambda: -0.5 * parameter.square().sum())
    assert parameter.item() == 0.1
    assert not optimizer.state.get(parameter)


def test_groups_frozen_and_unused_parameters() -> None:
    x, y = classes()
    model = network()
    model[0].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    bias = model[0].bias.clone()
    groups = [
        {"params": [*model[0].parameters(), unused], "prior_precision": 3.0},
        {"params": model[2].parameters(), "lr": 0.0},
    ]
    optimizer = DiagonalOnlineNewton(groups, num_data=NUM_DATA, prior_precision=1.0, lr=0.1)
    before = model[2].weight.clone()
    optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))
    assert model[0].bias.equal(bias)
    assert model[2].weight.equal(before)
    # the prior alone acts on it: s = 0.9 (N + 3) + 0.1 * 3, theta - lr 3 theta / s
    expected = 1 - 0.1 * 3.0 / (0.9 * (NUM_DATA + 3.0) + 0.3)
    torch.testing.assert_close(unused.detach(), torch.full_like(unused, expected))
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert posterior.prior_of("0.weight") == 3.0
    assert posterior.prior_of("2.bias") == 1.0
    assert "0.bias" not in posterior.names


def test_curvatures_that_do_not_fit_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ArgumentError, match="with a diagonal"):
        DiagonalOnlineNewton(parameters, num_data=3, prior_precision=1.0, curvature="hessian")
    with pytest.raises(ArgumentError, match="number of probes from 1"):
        Hutchinson(0)
    stays = DiagonalOnlineNewton(
        parameters, num_data=3, prior_precision=1.0, curvature=Reparameterised()
    )
    with pytest.raises(ArgumentError, match="draws samples"):
        stays.step(lambda: parameters[0].square().sum())


@pytest.mark.parametrize("make", [DiagonalOnlineNewton, DiagonalVON])
def test_single_precision_training_of_a_network_lowers_the_loss_at_the_mean(make) -> None:
    x = classes()[0].float()
    y = (x[:, :2] > 0).sum(1)
    model = network().float()
    optimizer = make(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=1.0,
        curvature=GaussNewton("categorical", probes=1),
    )
    losses = []
    for _ in range(60):
        optimizer.step(lambda: (model(x), y))
        losses.append(float(nn.functional.cross_entropy(model(x), y).detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert diagonal_of(optimizer, model).dtype == torch.float32


@pytest.mark.parametrize("curvature", [Hutchinson(), GaussNewton("categorical")], ids=str)
def test_attention_is_differentiated_twice(curvature) -> None:
    """Fused kernels have no second derivative: the steps are those of the plain kernel."""

    def precision() -> Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))
        x, y = torch.randn(5, 3, 4), torch.randint(0, 3, (5,))
        settings = {"num_data": 5, "prior_precision": 5.0, "precision_lr": 0.01}
        optimizer = DiagonalOnlineNewton(model.parameters(), curvature=curvature, **settings)
        pair = isinstance(curvature, GaussNewton)
        for _ in range(2):
            optimizer.step(
                lambda: (model(x), y) if pair else nn.functional.cross_entropy(model(x), y)
            )
        return diagonal_of(optimizer, model)

    found = precision()
    with sdpa_kernel(SDPBackend.MATH):
        expected = precision()
    torch.testing.assert_close(found, expected)
    assert found.std() > 1e-4
