"""Hessians of single layers, against the dense Hessian in float64."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import engram
from engram.core.state.model import state_preserved
from engram.likelihoods import Categorical
from engram.linalg.gcr import BlockGCR
from engram.retraining import layer_hessians as module
from engram.retraining.hessian_at import HessianAt
from engram.retraining.layer_hessians import layer_hessians, sharpened
from engram.retraining.open_stack import open_stack
from engram.retraining.recipes import Newton
from retraining_problems import classifier

DELTA = 0.5


def dense_hessian(net, stack, x, y):
    def value(flat):
        outputs = functional_call(net, stack.layout.unflatten(flat), (x,))
        losses = nn.functional.cross_entropy(outputs, y, reduction="sum")
        return losses + 0.5 * DELTA * (flat**2).sum()

    return torch.autograd.functional.hessian(value, stack.start)


def of_layer(dense, stack, weight, bias):
    """The part of a weight and its bias, the bias the last column of each row."""
    places = stack.layout.unflatten(torch.arange(len(dense)))
    chosen = torch.cat([places[weight], places[bias][:, None]], dim=1).flatten()
    return dense[chosen][:, chosen]


@pytest.mark.parametrize("cut", [False, True], ids=["at once", "in parts"])
def test_layers_equal_their_part_of_the_dense_hessian(cut, monkeypatch):
    if cut:
        monkeypatch.setattr(module, "CACHE_BYTES", 5 * 8 * module.MOST_DIRECTIONS**2)
    net, x, y = classifier()
    bases = {
        n: torch.eye(p.shape[1] + 1).double() for n, p in net.named_parameters() if p.dim() > 1
    }
    with state_preserved(net):
        stack = open_stack(net, (x, y), Categorical(), DELTA)
        found = layer_hessians(stack, stack.start, bases)
        dense = dense_hessian(net, stack, x, y)
    assert set(found) == set(bases)
    for name, hessian in found.items():
        expected = of_layer(dense, stack, name, name.replace("weight", "bias"))
        assert (hessian - expected).abs().max() < 1e-9
        turn = torch.linalg.qr(torch.randn(len(bases[name]), 2).double()).Q.contiguous()
        with state_preserved(net):
            turned = layer_hessians(stack, stack.start, {name: turn})[name]
        whole = torch.kron(torch.eye(len(expected) // len(turn)).double(), turn)
        assert (turned - whole.T @ expected @ whole).abs().max() < 1e-9


def test_layers_that_read_several_rows_an_example_have_none():
    net = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Flatten(), nn.Linear(6, 3))
    _, x, y = classifier()
    net = net.double()
    with state_preserved(net):
        stack = open_stack(net, (x, y), Categorical(), DELTA)
        bases = {"1.weight": torch.eye(3).double(), "3.weight": torch.eye(7).double()}
        assert set(layer_hessians(stack, stack.start, bases)) == {"3.weight"}


@pytest.mark.parametrize("largest", [2048, 9], ids=["all directions", "a few"])
def test_a_single_layer_is_inverted_as_far_as_it_is_known(largest, monkeypatch):
    """For one layer the whole Hessian is the layer's."""
    monkeypatch.setattr(module, "LARGEST", largest)
    _, x, y = classifier()
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    posterior = engram.laplace(
        net, (x, y), likelihood=Categorical(), structure="kronecker", prior_precision=DELTA,
        progress=False,
    )  # fmt: skip
    (block,) = posterior.blocks
    with state_preserved(net):
        stack = open_stack(net, (x, y), Categorical(), DELTA)
        solve = Newton(posterior=posterior)._solve_with(stack)
        found = sharpened(stack, stack.start, posterior, solve)(torch.eye(15).double())
        dense = dense_hessian(net, stack, x, y)
    kept = block.precision[0].sum(0).argsort(descending=True)[: largest // 3]
    units = torch.eye(5).double()[:, kept]
    basis = torch.kron(torch.eye(3).double(), block.columns[0] @ units)
    rows = torch.arange(12).view(3, 4), torch.arange(12, 15).view(3, 1)
    order = torch.cat(rows, dim=1).flatten()  # of (row, column) among the flat parameters
    dense, found, given = (
        m[order][:, order] for m in (dense, found, solve(torch.eye(15).double()))
    )
    inside = basis @ torch.linalg.inv(basis.T @ dense @ basis) @ basis.T
    outside = torch.eye(15).double() - basis @ basis.T
    assert (found - inside - outside @ given @ outside).abs().max() < 1e-9


def test_systems_take_fewer_products():
    """Of a net after a few steps of training: its Hessian is that of no Kronecker product."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    x = torch.randn(300, 12).double() * torch.logspace(0.5, -1, 12).double()
    y = (x[:, :3] + torch.randn(300, 3)).argmax(1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(net(x), y, reduction="sum")
        value = value + 0.5 * DELTA * sum((p**2).sum() for p in net.parameters())
        value.backward()
        return value

    optimizer.step(closure)
    posterior = engram.laplace(
        net, (x, y), likelihood=Categorical(), structure="kronecker", prior_precision=DELTA,
        progress=False,
    )  # fmt: skip
    products = []
    with state_preserved(net):
        stack = open_stack(net, (x, y), Categorical(), DELTA)
        solve = Newton(posterior=posterior)._solve_with(stack)
        members = [torch.tensor([i]) for i in range(30)]
        right = stack.left_out(stack.start.expand(30, -1), members)[1]
        for apply in (solve, sharpened(stack, stack.start, posterior, solve)):
            hessian = HessianAt(stack, stack.start, 24)
            shared = BlockGCR(apply, hessian, right, right.shape[1])
            found, left = shared.solve(right, 0.05 * right.norm(dim=1))
            assert (hessian(found) + left - right).abs().max() < 1e-8
            products.append(shared.count)
    assert products[1] < 0.8 * products[0]
