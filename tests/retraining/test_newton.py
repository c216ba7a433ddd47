"""Copies that share a Hessian and its inverse, against dense answers in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import engram
from engram.core.state.model import state_preserved
from engram.likelihoods import Categorical, Gaussian
from engram.problem import Opener
from engram.retraining import newton
from engram.retraining.newton import SharedHessian, simplified_newton
from engram.retraining.quasi_newton import begin
from engram.retraining.recipes import Newton
from engram.retraining.stack import Objective, open_stack
from retraining_problems import classifier, minimised, newton_refit

DELTA = 0.5
NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "one layer": lambda: nn.Linear(4, 3),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)
    ),
    "sequence": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.GELU(), nn.Flatten(), nn.Linear(6, 3)
    ),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("keep", [True, False], ids=["graph kept", "graph made again"])
@pytest.mark.parametrize("name", NETS)
def test_hessian_products_equal_the_dense_hessian(name, keep, monkeypatch):
    if not keep:
        monkeypatch.setattr(newton, "MEMORY_SHARE", 0.0)
    torch.manual_seed(0)
    _, x, y = classifier()
    net = NETS[name]().double()
    with state_preserved(net):
        stack = open_stack(net, (x, y), Categorical(), DELTA)

        def value(flat):
            outputs = functional_call(net, stack.layout.unflatten(flat), (x,))
            losses = nn.functional.cross_entropy(outputs, y, reduction="sum")
            return losses + 0.5 * DELTA * (flat**2).sum()

        dense = torch.autograd.functional.hessian(value, stack.start)
        vectors = random(6, len(stack.start))
        hessian = SharedHessian(stack, stack.start, 6)
        assert (hessian.graphs is not None) == keep
        for _ in range(2):
            assert (hessian.times(vectors) - vectors @ dense).abs().max() < 1e-9


@pytest.mark.parametrize("groups", [[[i] for i in range(0, 144, 16)], [[1, 5, 9, 70], [2, 3], [8]]])
def test_copies_equal_a_dense_newton_refit(groups):
    model, x, y = classifier()
    x, y = torch.cat([x + 0.3 * random(36, 4, seed=s) for s in range(4)]), y.repeat(4)
    minimised(model, x, y, torch.ones(144), DELTA)
    truth = engram.retrain(
        model, (x, y), groups=groups, train=Newton(relative_gradient=1e-8), prior_precision=DELTA,
        keep_models=True, progress=False,
    )  # fmt: skip
    assert truth.converged.all()
    for row, members in enumerate(groups):
        weights = torch.ones(144)
        weights[members] = 0.0
        exact = newton_refit(copy.deepcopy(model), x, y, weights, DELTA)
        for name, parameter in exact.named_parameters():
            assert (truth.parameters[name][row] - parameter).abs().max() < 1e-7


def test_many_copies_with_kronecker_factors_equal_a_dense_newton_refit(monkeypatch):
    monkeypatch.setattr(newton, "DENSE_PARAMETERS", 0)
    model, x, y = classifier()
    x, y = torch.cat([x + 0.3 * random(36, 4, seed=s) for s in range(4)]), y.repeat(4)
    minimised(model, x, y, torch.ones(144), DELTA)
    chosen = list(range(0, 144, 5))
    truth = engram.retrain(
        model, (x, y), chosen, train=Newton(relative_gradient=1e-8), prior_precision=DELTA,
        keep_models=True, progress=False,
    )  # fmt: skip
    assert truth.converged.all()
    for row, left_out in enumerate(chosen[::4]):
        weights = torch.ones(144)
        weights[left_out] = 0.0
        exact = newton_refit(copy.deepcopy(model), x, y, weights, DELTA)
        for name, parameter in exact.named_parameters():
            assert (truth.parameters[name][4 * row] - parameter).abs().max() < 1e-7


def test_near_copies_take_few_gradients():
    model, x, y = classifier()
    x, y = torch.cat([x + 0.3 * random(36, 4, seed=s) for s in range(4)]), y.repeat(4)
    minimised(model, x, y, torch.ones(144), DELTA)
    members = tuple(torch.tensor([i]) for i in range(0, 144, 12))
    with state_preserved(model):
        stack = open_stack(model, (x, y), Categorical(), DELTA)
        recipe = Newton(relative_gradient=1e-3).bind(
            model, Opener((x, y), Categorical()), DELTA, False
        )
        start = stack.start.expand(len(members), -1)
        found = recipe.train(Objective(stack, members), start, 0, lambda count: None)
    assert (found.gradient_norm <= found.wanted_norm).all()
    assert found.evaluations.double().median() <= 5


def test_leverages_near_one_are_learned_from_own_steps():
    """The Hessian of all the data is far from a copy's; each step there is one direction wrong."""
    x, y = random(30, 4), random(30, 1, seed=1)
    x[:3] *= 20
    model = nn.Linear(4, 1, bias=False).double()
    gram = x.T @ x + DELTA * torch.eye(4).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(gram, x.T @ y).T)
    members = tuple(torch.tensor([i]) for i in range(5))
    with state_preserved(model):
        stack = open_stack(model, (x, y), Gaussian(1.0), DELTA)
        objective, start = Objective(stack, members), stack.start.expand(5, -1)
        state, targets = begin(objective, start), torch.full((5,), 1e-8).double()
        simplified_newton(objective, state, targets, torch.clone, lambda count: None)
    assert not state.moving.any()
    assert int(state.evaluations.max()) <= 5
    for i in range(5):
        rest = torch.arange(30) != i
        inner = x[rest].T @ x[rest] + DELTA * torch.eye(4).double()
        exact = torch.linalg.solve(inner, x[rest].T @ y[rest])[:, 0]
        assert (state.flat[i] - exact).abs().max() < 1e-7


def test_a_start_that_all_share_is_visited_once():
    model, x, y = classifier()
    with state_preserved(model):
        stack = open_stack(model, (x, y), Categorical(), DELTA)
        members = torch.tensor([3]), torch.tensor([1, 7]), torch.tensor([], dtype=torch.long)
        objective = Objective(stack, members)
        start = stack.start.expand(3, -1)
        value, gradient = stack.value_and_gradient(start, objective.weights)
        state = begin(objective, start)
    assert (state.value - value).abs().max() < 1e-10
    assert (state.gradient - gradient).abs().max() < 1e-10
