"""Kronecker factors without the example itself, against factors by hand and against refits."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError
from engram.likelihoods import Gaussian
from engram.posteriors.downdating import downdated

DELTA = 0.7


def net_and_data(count=30, inputs=5, hidden=4, classes=3, dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))
    data = (torch.randn(count, inputs, dtype=dtype), torch.randint(0, classes, (count,)))
    return model.to(dtype), data


def by_hand(model, data):
    """d of every example, from matrices that are all built, layer by layer."""
    x, y = data
    first = model[0](x)
    seen = [x, first.tanh().detach()]
    outputs = model[2](first.tanh())
    probabilities = outputs.softmax(1).detach()
    at = [first, outputs]
    one = torch.ones(len(x), 1, dtype=x.dtype)
    deviation = torch.zeros_like(probabilities)
    for z, inputs in zip(at, seen, strict=True):
        columns = torch.cat([inputs, one], 1)
        rows = torch.stack(  # dz of every output, [K, N, O]
            [torch.autograd.grad(outputs[:, k].sum(), z, retain_graph=True)[0] for k in range(3)]
        )
        outer = probabilities[:, :, None] * probabilities[:, None]
        curvature = torch.diag_embed(probabilities) - outer
        row_factor = torch.einsum("kno,nkl,lnp->op", rows, curvature, rows).contiguous() / len(x)
        for i in range(len(x)):
            remaining = columns.T @ columns - torch.outer(columns[i], columns[i])
            precision = torch.kron(row_factor, remaining)
            precision += DELTA * torch.eye(len(precision), dtype=x.dtype)
            jacobian = torch.stack([torch.kron(rows[k, i], columns[i]) for k in range(3)])
            error = probabilities[i] - functional.one_hot(y[i], 3)
            deviation[i] += jacobian @ torch.linalg.solve(precision, jacobian.T @ error)
    return deviation


def kronecker(model, data, **options):
    return engram.laplace(
        model, data, structure="kronecker", prior_precision=DELTA, progress=False, **options
    )


def test_it_is_the_dense_solve_with_the_factors_of_the_remaining_data():
    model, data = net_and_data()
    posterior = kronecker(model, data)
    result = engram.sensitivities(model, data, posterior, estimator="downdated", progress=False)
    plain = engram.sensitivities(model, data, posterior, estimator="linear", progress=False)
    assert torch.allclose(result.deviation, by_hand(model, data), atol=1e-10)
    assert (result.deviation - plain.deviation).abs().max() > 1e-2
    assert torch.allclose(result.leverage, plain.leverage, rtol=0, atol=0, equal_nan=True)
    assert result.diagnostics.relative_gradient == plain.diagnostics.relative_gradient


def test_it_is_exact_for_ridge_regression():
    torch.manual_seed(0)
    x = torch.randn(20, 4, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(20, 1, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()

    def solution(x, y):
        return torch.linalg.solve(x.T @ x + DELTA * torch.eye(4, dtype=x.dtype), x.T @ y)

    model.weight.data.copy_(solution(x, y).T)
    posterior = kronecker(model, (x, y), likelihood=Gaussian())
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    for i in range(len(x)):
        rest = torch.arange(len(x)) != i
        refit = x[i] @ solution(x[rest], y[rest]) - x[i] @ solution(x, y)
        assert torch.allclose(result.deviation[i], refit, atol=1e-12)


def test_an_input_that_one_example_alone_has_is_left_to_the_prior():
    torch.manual_seed(0)
    x = torch.randn(20, 4, dtype=torch.float64)
    x[:, 3] = 0
    x[0] = torch.tensor([0.0, 0, 0, 50])
    model = nn.Linear(4, 3, bias=False).double()
    data = (x, torch.randint(0, 3, (20,)))
    result = engram.sensitivities(model, data, kronecker(model, data), progress=False)
    probabilities = model(x[:1]).softmax(1)[0].detach()
    error = probabilities - functional.one_hot(data[1][0], 3)
    assert torch.allclose(result.deviation[0], 50**2 / DELTA * error, rtol=1e-6)


def test_it_is_the_default_with_kronecker_factors_only():
    model, data = net_and_data()
    posterior = kronecker(model, data)
    result = engram.sensitivities(model, data, posterior, progress=False)
    assert result.provenance["settings"]["estimator"] == "downdated"
    diagonal = engram.laplace(
        model, data, structure="diagonal", progress=False, prior_precision=1.0
    )
    other = engram.sensitivities(model, data, diagonal, progress=False)
    assert other.provenance["settings"]["estimator"] == "linear"
    with pytest.raises(ArgumentError, match="Kronecker factors"):
        engram.sensitivities(model, data, diagonal, estimator="downdated")


def test_merged_eigenvalues_change_it_little_and_never_beyond_the_prior():
    model, data = net_and_data(count=400, inputs=150, hidden=100, dtype=torch.float32)
    data[0].mul_(torch.logspace(0, -3, 150))
    exact, rough = (kronecker(model, data, tolerance=t) for t in (0.0, 0.03))
    assert any(block.clusters is not None for block in rough.blocks)
    wanted, found = (
        engram.sensitivities(model, data, posterior, estimator="downdated", progress=False)
        for posterior in (exact, rough)
    )
    change = (found.deviation - wanted.deviation).norm(dim=1) / wanted.deviation.norm(dim=1)
    assert float(change.median()) < 0.05
    columns = torch.cat([data[0], torch.ones(400, 1)], 1)
    largest = columns.square().sum(1, keepdim=True) / DELTA
    block = downdated(rough).blocks[0]
    eigenvectors = block.rows[0].mT.expand(400, -1, -1)
    gains = block.rank_one_products(eigenvectors, data[0]).diagonal(dim1=1, dim2=2)
    assert bool((gains <= largest * (1 + 1e-5)).all())
    assert bool((gains > 0).all())


def test_layers_at_many_positions_keep_their_factors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).double()
    data = (torch.randn(12, 1, 4, 4, dtype=torch.float64), torch.randint(0, 8, (12,)))
    posterior = kronecker(model, data)
    found, plain = (
        engram.sensitivities(model, data, posterior, estimator=rule, progress=False)
        for rule in ("downdated", "linear")
    )
    assert torch.equal(found.deviation, plain.deviation)
