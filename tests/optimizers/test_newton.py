"""Newton and Online Newton against closed forms and updates written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, ModelMismatchError, NonFiniteError, PosteriorError
from engram.likelihoods import Categorical
from engram.optimizers import GaussNewton, Hutchinson, Newton, OnlineNewton
from worked_problems import (
    DELTA,
    NUM_DATA,
    binary,
    classes,
    line,
    logistic,
    logistic_derivatives,
    network,
    ridge,
    ridge_solution,
    squared,
)

EYE = torch.eye(2, dtype=torch.float64)


def test_one_newton_step_solves_ridge_regression() -> None:
    x, y = ridge()
    model = line(3)
    optimizer = Newton(model.parameters(), num_data=NUM_DATA, prior_precision=DELTA)
    optimizer.step(squared(model, x, y))
    solution, hessian = ridge_solution(x, y)
    torch.testing.assert_close(model.weight.detach()[0], solution, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state["shared"]["precision"], hessian)


@pytest.mark.parametrize("curvature", [None, GaussNewton("gaussian")], ids=["hessian", "ggn"])
def test_online_newton_stops_at_the_ridge_solution_with_its_hessian(curvature) -> None:
    x, y = ridge()
    model = line(3)
    optimizer = OnlineNewton(
        model.parameters(), num_data=NUM_DATA, prior_precision=DELTA, curvature=curvature, lr=0.5
    )
    closure = squared(model, x, y) if curvature is None else lambda: (model(x), y)
    for _ in range(300):
        optimizer.step(closure)
    solution, hessian = ridge_solution(x, y)
    torch.testing.assert_close(model.weight.detach()[0], solution, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(optimizer.state["shared"]["precision"], hessian)


def test_online_newton_by_hand_with_groups_and_a_schedule() -> None:
    x, y = logistic()
    x_parts = nn.ParameterList([torch.full((1,), 0.3), torch.full((1,), -0.2)]).double()
    groups = [{"params": [x_parts[0]]}, {"params": [x_parts[1]], "prior_precision": 4.0, "lr": 0.2}]
    optimizer = OnlineNewton(
        groups, num_data=NUM_DATA, prior_precision=DELTA, lr=0.4, precision_lr=0.3
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    prior = torch.tensor([DELTA, 4.0], dtype=torch.float64)
    precision = torch.diag(NUM_DATA + prior)
    rates = torch.tensor([0.4, 0.2], dtype=torch.float64)
    theta = torch.cat([p.detach().clone() for p in x_parts])
    for number in range(6):
        part = slice(5 * number, 5 * number + 10)  # batches of 10

        def closure(part: slice = part) -> torch.Tensor:
            logits = x[part] @ torch.cat(list(x_parts))
            return nn.functional.binary_cross_entropy_with_logits(logits, y[part, 0])

        gradient, hessian = logistic_derivatives(theta, x[part], y[part])
        scale = NUM_DATA / 10
        precision = 0.7 * precision + 0.3 * (scale * hessian + torch.diag(prior))
        step = torch.linalg.solve(precision, scale * gradient + prior * theta)
        theta = theta - rates * 0.9**number * step
        optimizer.step(closure)
        schedule.step()
        got = torch.cat([p.detach() for p in x_parts])
        torch.testing.assert_close(got, theta, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(optimizer.state["shared"]["precision"], precision)


def test_newton_at_its_fixed_point_is_the_laplace_posterior() -> None:
    x, y = logistic()
    model = line(2)
    optimizer = Newton(model.parameters(), num_data=NUM_DATA, prior_precision=DELTA)
    for _ in range(20):
        optimizer.step(binary(model, x, y))
    read = engram.posterior_of(optimizer, model, num_data=NUM_DATA, likelihood="bernoulli")
    fitted = engram.laplace(
        model,
        (x, y),
        likelihood="bernoulli",
        structure="full",
        prior_precision=DELTA,
        progress=False,
    )
    vectors = {"weight": EYE.reshape(2, 1, 2)}
    torch.testing.assert_close(
        read.solve(vectors)["weight"], fitted.solve(vectors)["weight"], rtol=1e-12, atol=0
    )
    assert read.prior_precision == fitted.prior_precision == DELTA
    assert read.settings["prior_from"] == "optimizer"
    left, right = (engram.sensitivities(model, (x, y), p, progress=False) for p in (read, fitted))
    torch.testing.assert_close(left.loo_loss, right.loo_loss)


def test_newton_with_gauss_newton_equals_full_laplace_on_a_network() -> None:
    x, y = classes()
    model = network()
    optimizer = Newton(
        model.parameters(),
        num_data=NUM_DATA,
        prior_precision=20.0,
        curvature=GaussNewton("categorical"),
    )
    for _ in range(60):
        optimizer.step(lambda: (model(x), y))
    read = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    fitted = engram.laplace(model, (x, y), structure="full", prior_precision=20.0, progress=False)
    assert read.log_det() == pytest.approx(fitted.log_det(), rel=1e-9)
    assert read.curvature == "ggn"
    assert isinstance(read.likelihood, Categorical)
    with pytest.raises(ModelMismatchError, match="curvature was made with"):
        engram.posterior_of(optimizer, model, num_data=NUM_DATA, likelihood="gaussian")


def test_an_indefinite_hessian_is_an_error_and_changes_nothing() -> None:
    parameter = nn.Parameter(torch.tensor([0.1, 0.1], dtype=torch.float64))
    optimizer = Newton([parameter], num_data=10, prior_precision=0.1)
    saddle = torch.tensor([1.0, -1.0], dtype=torch.float64)
    with pytest.raises(PosteriorError, match=r"smallest eigenvalue is -9\.9.*GaussNewton"):
        optimizer.step(lambda: 0.5 * (saddle * parameter**2).sum())
    assert parameter.detach().tolist() == [0.1, 0.1]
    assert "precision" not in optimizer.state["shared"]
    assert optimizer.state["shared"]["step"] == 0


def test_too_many_parameters_for_a_matrix_are_an_error_before_training() -> None:
    parameter = nn.Parameter(torch.zeros(10_000_000))
    for make in (Newton, OnlineNewton, engram.optimizers.VON):
        with pytest.raises(PosteriorError, match=r"10,000,000 parameters.*Diagonal"):
            make([parameter], num_data=10, prior_precision=1.0)


def test_bad_settings_and_closures_say_what_to_do() -> None:
    model, (x, y) = line(3), ridge()
    parameters = list(model.parameters())
    for wrong, match in [
        ({"num_data": 0}, "positive num_data"),
        ({"prior_precision": 0.0}, "positive prior_precision"),
        ({"lr": -1.0}, "lr of at least 0"),
        ({"precision_lr": 1.5}, "precision_lr from 0 to 1"),
        ({"curvature": Hutchinson()}, "full matrix"),
    ]:
        with pytest.raises(ArgumentError, match=match):
            OnlineNewton(parameters, **({"num_data": 3, "prior_precision": 1.0} | wrong))
    optimizer = Newton(parameters, num_data=NUM_DATA, prior_precision=1.0)
    loss = squared(model, x, y)

    def backward() -> torch.Tensor:
        found = loss()
        found.backward()
        return found

    for closure, match in [
        (None, "a closure"),
        (lambda: loss().item(), "one number; got float"),
        (lambda: loss().detach(), "without a graph"),
        (lambda: (model(x), y), "one number; got tuple"),
        (lambda: (model(x) - y).square(), r"got a tensor of shape \(40, 1\)"),
        (backward, "do not call backward"),
    ]:
        with pytest.raises(ArgumentError, match=match):
            optimizer.step(closure)
    with pytest.raises(NonFiniteError, match="finite loss"):
        optimizer.step(lambda: loss() * float("nan"))
    with pytest.raises(ArgumentError, match="one num_data"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "num_data": 3})
    assert len(optimizer.param_groups) == 1
    pair = Newton(parameters, num_data=3, prior_precision=1.0, curvature=GaussNewton("gaussian"))
    with pytest.raises(ArgumentError, match=r"returns \(outputs, targets\)"):
        pair.step(loss)


def test_posterior_of_checks_what_the_optimizer_was_made_with() -> None:
    model, (x, y) = line(3), ridge()
    optimizer = Newton(model.parameters(), num_data=NUM_DATA, prior_precision=DELTA)
    with pytest.raises(PosteriorError, match="taken a step"):
        engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    optimizer.step(squared(model, x, y))
    with pytest.raises(ArgumentError, match=r"num_data that the optimizer was made with, 40"):
        engram.posterior_of(optimizer, model, num_data=41)
    with pytest.raises(ArgumentError, match=r"prior_precision that the optimizer was made with"):
        engram.posterior_of(optimizer, model, num_data=NUM_DATA, prior_precision=2.0)
    with pytest.raises(ArgumentError, match=r"mean loss"):
        engram.posterior_of(
            optimizer, model, num_data=NUM_DATA, reduction="sum", training_batch_size=5
        )
