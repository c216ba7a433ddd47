"""The Newton step of the remaining data, against dense solves and against training again."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

import engram
from engram.core.parameters import Layout
from engram.likelihoods import Gaussian
from engram.sensitivity.estimators import newton
from minima import to_minimum

DELTA = 5.0


def trained(count=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = (torch.randn(count, 3).double(), torch.randint(0, 3, (count,)))
    to_minimum(model, data, DELTA)
    return model, data


def by_hand(model, data, index):
    """d of one example, from matrices that are all built."""
    layout = Layout.of({n: p.detach() for n, p in model.named_parameters()})
    start = layout.flatten({n: p.detach() for n, p in model.named_parameters()})
    x, y = data

    def outputs(vector, chosen):
        return functional_call(model, layout.unflatten(vector), (x[chosen],))

    def loss(vector, chosen):
        return nn.functional.cross_entropy(outputs(vector, chosen), y[chosen], reduction="sum")

    rest = torch.arange(len(x)) != index
    remaining = hessian(lambda v: loss(v, rest))(start) + DELTA * torch.eye(len(start)).double()
    one = slice(index, index + 1)
    step = torch.linalg.solve(remaining, jacrev(lambda v: loss(v, one))(start))
    return jacrev(lambda v: outputs(v, one)[0])(start) @ step, torch.linalg.eigvalsh(remaining)[0]


def test_it_is_the_dense_solve_with_the_hessian_of_the_remaining_data():
    model, data = trained()
    posterior = engram.laplace(model, data, curvature="hessian", prior_precision=DELTA)
    result = engram.sensitivities(model, data, posterior, estimator="newton", progress=False)
    plain = engram.sensitivities(model, data, posterior, estimator="corrected", progress=False)
    for index in range(0, 40, 5):
        expected, smallest = by_hand(model, data, index)
        assert smallest > 0
        assert torch.allclose(result.deviation[index], expected, atol=1e-8)
    assert (result.deviation - plain.deviation).abs().max() > 1e-3
    assert torch.equal(result.leverage, plain.leverage)


def test_it_is_exact_for_linear_regression():
    torch.manual_seed(0)
    x = torch.randn(30, 4).double()
    y = x.sum(1, keepdim=True) + torch.randn(30, 1).double()
    model = nn.Linear(4, 1, bias=False).double()

    def solution(x, y):
        return torch.linalg.solve(x.T @ x + DELTA * torch.eye(4).double(), x.T @ y)

    model.weight.data.copy_(solution(x, y).T)
    posterior = engram.laplace(
        model, (x, y), likelihood=Gaussian(), prior_precision=DELTA, progress=False
    )
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    assert result.provenance["settings"]["estimator"] == "newton"
    rest = torch.arange(30) != 7
    without = x[7] @ solution(x[rest], y[rest])
    assert torch.allclose(result.outputs[7] + result.deviation[7], without, atol=1e-10)


def test_where_nothing_definite_remains_the_cautious_rule_is_kept(monkeypatch):
    monkeypatch.setattr(newton, "LARGEST_GAIN", 0.0)
    model, data = trained()
    posterior = engram.laplace(model, data, curvature="hessian", prior_precision=DELTA)
    result = engram.sensitivities(model, data, posterior, progress=False)
    plain = engram.sensitivities(model, data, posterior, estimator="corrected", progress=False)
    assert torch.equal(result.deviation, plain.deviation)
    assert torch.equal(result.loo_loss, plain.loo_loss)


def test_neither_batch_size_nor_order_matters():
    model, data = trained()
    posterior = engram.laplace(model, data, curvature="hessian", prior_precision=DELTA)
    whole = engram.sensitivities(model, data, posterior, progress=False)
    parts = engram.sensitivities(model, data, posterior, batch_size=7, progress=False)
    turned = (data[0].flip(0), data[1].flip(0))
    back = engram.sensitivities(model, turned, posterior, progress=False)
    assert torch.allclose(whole.deviation, parts.deviation, atol=1e-10)
    assert torch.allclose(whole.deviation, back.deviation.flip(0), atol=1e-10)


def test_it_works_over_the_last_layer():
    model, data = trained()
    posterior = engram.laplace(
        model, data, structure="last_layer", curvature="hessian", prior_precision=DELTA
    )
    found = engram.sensitivities(model, data, posterior, progress=False)
    plain = engram.sensitivities(model, data, posterior, estimator="corrected", progress=False)
    assert found.provenance["settings"]["estimator"] == "newton"
    # the outputs are linear in the last layer: its Hessian is its Gauss-Newton matrix
    assert torch.allclose(found.deviation, plain.deviation, rtol=0.02, atol=1e-6)


def test_other_posteriors_are_refused():
    model, data = trained()
    posterior = engram.laplace(model, data, structure="full", prior_precision=DELTA)
    with pytest.raises(engram.errors.ArgumentError, match="exact Hessian"):
        engram.sensitivities(model, data, posterior, estimator="newton")


def test_an_unknown_name_lists_it():
    model, data = trained()
    posterior = engram.laplace(model, data, structure="full", prior_precision=DELTA)
    with pytest.raises(engram.errors.ArgumentError, match="newton"):
        engram.sensitivities(model, data, posterior, estimator="fifth")
