"""Expectations over samples of q, and the step size, against Jacobians built row by row."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError
from sampled import SAMPLES, SEED, drawn, gradients, pieces, precision, problem

GROUP = [1, 4, 5, 8]


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal"])
def test_sensitivities_are_the_dense_expectation(structure: str) -> None:
    model, data, posterior = problem(structure)
    expected = sum(gradients(other, data) for other in drawn(model, posterior)) / SAMPLES
    step = torch.linalg.solve(precision(posterior), expected.mT).mT
    deviation = torch.einsum("nkp,np->nk", pieces(model, *data)[0], step)
    before = copy.deepcopy(model.state_dict())
    found = engram.sensitivities(model, data, posterior, samples=SAMPLES, seed=SEED)
    torch.testing.assert_close(found.deviation, deviation)
    loo = functional.cross_entropy(model(data[0]) + deviation, data[1], reduction="none")
    torch.testing.assert_close(found.loo_loss, loo.detach())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found.provenance["settings"]["samples"] == SAMPLES


def test_deviations_can_be_averaged_with_any_rule() -> None:
    model, data, posterior = problem(prior=20.0)
    inverse, total = torch.linalg.inv(precision(posterior)), torch.zeros(12, 3).double()
    for other in drawn(model, posterior):
        jacobian, error, hessian = pieces(other, *data)
        variance = jacobian @ inverse @ jacobian.mT
        left = torch.eye(3).double() - variance @ hessian
        total += torch.linalg.solve(left, variance @ error[:, :, None])[:, :, 0] / SAMPLES
    given = {"samples": SAMPLES, "seed": SEED, "expectation": "deviation"}
    found = engram.sensitivities(model, data, posterior, estimator="corrected", **given)
    torch.testing.assert_close(found.deviation, total)


@pytest.mark.parametrize("estimator", ["linear", "corrected"])
def test_a_group_is_the_dense_expectation(estimator: str) -> None:
    model, data, posterior = problem()
    x, y = data[0][GROUP], data[1][GROUP]
    gradient, curvature = torch.zeros(24 + 3).double(), torch.zeros(27, 27).double()
    for other in drawn(model, posterior):
        jacobian, error, hessian = pieces(other, x, y)
        gradient += torch.einsum("nkp,nk->p", jacobian, error) / SAMPLES
        curvature += torch.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian) / SAMPLES
    without = precision(posterior) - (curvature if estimator == "corrected" else 0)
    given = {"samples": SAMPLES, "seed": SEED, "estimator": estimator}
    found = engram.remove(model, data, posterior, GROUP, **given)
    assert found.delta is not None
    delta = posterior.layout.flatten(found.delta)
    torch.testing.assert_close(delta, torch.linalg.solve(without, gradient), rtol=1e-8, atol=1e-10)
    moved = pieces(model, x, y)[0] @ delta
    torch.testing.assert_close(found.group.outputs_without - found.group.outputs, moved)


def test_group_deviations_at_samples() -> None:
    model, data, posterior = problem()
    x, y = data[0][GROUP], data[1][GROUP]
    total, inverse = torch.zeros(4, 3).double(), torch.linalg.inv(precision(posterior))
    for other in drawn(model, posterior):
        jacobian, error, _ = pieces(other, x, y)
        rows = jacobian.flatten(0, 1)
        total += (rows @ inverse @ rows.mT @ error.flatten()).reshape(4, 3) / SAMPLES
    given = {"samples": SAMPLES, "seed": SEED, "expectation": "deviation", "estimator": "linear"}
    found = engram.remove(model, data, posterior, GROUP, evaluate_on=(x, y), **given)
    assert found.evaluation is not None
    for effect in (found.group, found.evaluation):
        torch.testing.assert_close(effect.outputs_without - effect.outputs, total)
        loss = functional.cross_entropy(model(x).detach() + total, y, reduction="none")
        torch.testing.assert_close(effect.loss_without, loss)


def test_the_papers_group_form_at_samples_is_that_of_single_examples() -> None:
    model, data, posterior = problem("diagonal")
    given = {"samples": SAMPLES, "seed": SEED, "estimator": "paper"}
    alone = engram.sensitivities(model, data, posterior, **given)
    found = engram.remove(model, data, posterior, GROUP, **given)
    deviation = found.group.outputs_without - found.group.outputs
    torch.testing.assert_close(deviation, alone.deviation[GROUP])
    torch.testing.assert_close(
        found.group.linearised_prediction_deviation, alone.prediction_deviation[GROUP]
    )


def test_classes_are_groups_at_samples_too() -> None:
    model, data, posterior = problem(prior=20.0)
    given = {"samples": SAMPLES, "seed": SEED, "step_size": 0.5}
    classes = engram.remove_classes(model, data, posterior, **given)
    members = (data[1] == 2).nonzero()[:, 0]
    alone = engram.remove(model, data, posterior, members, **given)
    assert alone.delta is not None
    found = classes[2].delta
    assert found is not None
    assert all(torch.equal(found[name], value) for name, value in alone.delta.items())
    half = engram.remove(
        model, data, posterior, members, weights=[0.5] * len(members), samples=SAMPLES, seed=SEED
    )
    assert half.delta is not None
    assert all(torch.equal(half.delta[name], value) for name, value in alone.delta.items())


def test_influence_meets_the_expected_gradient() -> None:
    model, data, posterior = problem()
    test = (data[0][:5] + 0.1, data[1][:5])
    own = sum(gradients(other, data) for other in drawn(model, posterior)) / SAMPLES
    dense = own @ torch.linalg.solve(precision(posterior), gradients(model, test).mT)
    found = engram.influence(
        model, data, test, posterior, samples=SAMPLES, seed=SEED, step_size=0.5
    )
    torch.testing.assert_close(found, 0.5 * dense)


@pytest.mark.parametrize("estimator", ["linear", "corrected", "iterated", "paper"])
def test_the_step_size_takes_a_share_out(estimator: str) -> None:
    model, data, posterior = problem()
    jacobian, error, hessian = pieces(model, *data)
    variance = jacobian @ torch.linalg.inv(precision(posterior)) @ jacobian.mT
    rho, plain = 0.3, (variance @ error[:, :, None])[:, :, 0]
    left = torch.eye(3).double() - rho * variance @ hessian
    dense = {
        "linear": rho * plain,
        "corrected": torch.linalg.solve(left, rho * plain),
        "paper": rho * variance.diagonal(dim1=1, dim2=2) * error,
    }
    found = engram.sensitivities(
        model, data, posterior, estimator=estimator, rounds=60, step_size=rho
    )
    if estimator == "iterated":  # the fixed point d = rho V e(f + d)
        at = (model(data[0]).detach() + found.deviation).softmax(1)
        residual = at - functional.one_hot(data[1], 3)
        dense["iterated"] = rho * (variance @ residual[:, :, None])[:, :, 0]
    torch.testing.assert_close(found.deviation, dense[estimator])
    whole = engram.sensitivities(model, data, posterior, estimator=estimator)
    torch.testing.assert_close(found.leverage, whole.leverage)


def test_the_step_size_of_newton_and_of_a_group() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(15, 2).double(), torch.randn(15, 1).double()
    gram = x.T @ x + torch.eye(2).double()
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.linalg.solve(gram, x.T @ y).T
    posterior = engram.laplace(
        model,
        (x, y),
        likelihood="gaussian",
        structure="full",
        curvature="hessian",
        prior_precision=1.0,
    )
    rho = 0.4
    weighted = [torch.where(torch.arange(15) == i, 1 - rho, 1.0).double()[:, None] for i in (0, 7)]
    for index, share in zip((0, 7), weighted, strict=True):  # ridge with less of one example
        refit = torch.linalg.solve((share * x).T @ x + torch.eye(2).double(), (share * x).T @ y)
        dense = x[index] @ (refit - model.weight.data.T)
        found = engram.sensitivities(model, (x, y), posterior, estimator="newton", step_size=rho)
        torch.testing.assert_close(found.deviation[index], dense, rtol=1e-6, atol=1e-9)
        group = engram.remove(model, (x, y), posterior, [index], step_size=rho)
        assert group.delta is not None
        torch.testing.assert_close(
            group.delta["weight"], refit.T - model.weight.data, rtol=1e-6, atol=1e-9
        )


def test_what_samples_cannot_do_is_said() -> None:
    model, data, posterior = problem()
    with pytest.raises(ArgumentError, match=r"trajectory.*with samples=2"):
        engram.sensitivities(model, data, posterior, estimator="trajectory", samples=2)
    with pytest.raises(ArgumentError, match=r"linear or corrected or paper with samples"):
        engram.remove(model, data, posterior, GROUP, estimator="newton", samples=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model)
    with pytest.raises(ArgumentError, match="no training= with samples"):
        engram.remove(model, data, posterior, GROUP, samples=2, training=training)
    with pytest.raises(ArgumentError, match="a positive step_size"):
        engram.influence(model, data, data, posterior, step_size=0.0)
    with pytest.raises(ArgumentError, match="number of samples"):
        engram.remove(model, data, posterior, GROUP, samples=-1)


def test_weights_are_the_callers_again_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, posterior = problem()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engram.engine.passes.Trace.own_gradient_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engram.sensitivities(model, data, posterior, samples=2)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])
