"""Mixtures of experts by rule: against plain autograd, their factors against plain layers'."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import engram
from autograd_deviation import expected_deviation
from engram.core.parameters import Layout
from engram.engine.experts import routed
from engram.engine.rules.base import Call
from engram.engine.rules.experts import RoutedLinear, routed_linear, sent
from engram.linalg.kronecker_factors import Factors
from fitted import assert_close

E, O, I = 3, 4, 5  # noqa: E741 (experts, outputs, inputs)
X = torch.randn(6, 7, I, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 2


class Experts(nn.Module):
    """As transformers writes them, each expert by itself; biases, and gates or none."""

    has_bias, has_post_expert_norm, is_transposed, _is_expert_parallel = True, False, False, False

    def __init__(self, has_gate):
        super().__init__()
        self.has_gate = has_gate
        width, name = (2 * O, "gate_up_proj") if has_gate else (O, "up_proj")
        setattr(self, name, nn.Parameter(torch.randn(E, width, I)))
        setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, width)))
        self.down_proj = nn.Parameter(torch.randn(E, I, O))
        self.down_proj_bias = nn.Parameter(torch.randn(E, I))
        self.act_fn = torch.tanh

    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden, index, weights):
        found = torch.zeros_like(hidden)
        name = "gate_up_proj" if self.has_gate else "up_proj"
        first, bias = getattr(self, name), getattr(self, f"{name}_bias")
        for expert in range(E):
            rows, places = torch.where(index == expert)
            moved = F.linear(hidden[rows], first[expert], bias[expert])
            moved = self._apply_gate(moved) if self.has_gate else self.act_fn(moved)
            moved = F.linear(moved, self.down_proj[expert], self.down_proj_bias[expert])
            found = found.index_add(0, rows, moved * weights[rows, places, None])
        return found


class Mixture(nn.Module):
    def __init__(self, has_gate):
        super().__init__()
        self.router, self.experts = nn.Linear(I, E, bias=False), Experts(has_gate)
        self.head = nn.Linear(I, 2)

    def forward(self, x):
        flat = x.reshape(-1, I)
        values, index = self.router(flat).softmax(-1).topk(2, dim=-1)
        mixed = self.experts(flat, index, values / values.sum(-1, keepdim=True))
        return self.head(mixed.reshape(x.shape).tanh().mean(1))


@pytest.mark.parametrize("structure", ["kronecker", "ekfac", "diagonal", "full"])
@pytest.mark.parametrize("has_gate", [True, False])
def test_the_deviation_is_that_of_plain_autograd(has_gate, structure):
    torch.manual_seed(1)
    model = Mixture(has_gate).double()
    fitted = engram.laplace(model, (X, Y), structure=structure, prior_precision=1.0, progress=False)
    found = engram.sensitivities(model, (X, Y), fitted, estimator="linear", progress=False)
    assert set(found.coverage.values()) == {"rule"}
    assert_close(found.deviation, expected_deviation(model, X, Y, fitted), 1e-9)
    leverage = engram.sensitivities(model, (X, Y), fitted, estimator="corrected", progress=False)
    assert torch.isfinite(leverage.leverage).all()


def test_the_factors_of_an_expert_are_those_of_a_layer_with_its_positions():
    generator = torch.Generator().manual_seed(3)
    inputs, gradients = (
        torch.randn(12, n, dtype=torch.float64, generator=generator) for n in (I, O)
    )
    experts = torch.arange(12) % 2  # the third has nothing to do
    shapes = torch.Size((E, O, I)), torch.Size((E, O))
    call = Call(
        sent(inputs, experts), dict(zip(("weight", "bias"), shapes, strict=True)), {"groups": E}, 3
    )
    factors, rule = Factors(Layout(("w", "b"), shapes)), RoutedLinear()
    rule.add_inputs(call, factors)
    rule.add_gradients(call, gradients, factors)
    found = factors.block(1.0, torch.float64)
    whole = {"w": torch.randn(shapes[0], dtype=torch.float64, generator=generator)}
    whole["b"] = torch.randn(shapes[1], dtype=torch.float64, generator=generator)
    moved = found.multiply(whole)
    for expert in range(2):
        own = Factors(Layout(("w", "b"), (torch.Size((O, I)), torch.Size((O,)))))
        chosen = experts == expert
        own.add_columns(inputs[chosen][None, None])
        own.add_rows(gradients[chosen][None, None])
        plain = own.block(1.0, torch.float64).multiply({n: v[expert] for n, v in whole.items()})
        for name, value in plain.items():
            assert_close(moved[name][expert], value, 1e-10)
    assert_close(moved["w"][2], whole["w"][2], 1e-12)  # the prior alone


def test_a_mixture_computes_what_it_did_and_its_copy_has_its_own_weights():
    model = Mixture(True).double()
    expected = model(X).detach()
    with routed(model):
        assert_close(model(X).detach(), expected, 1e-12)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.experts.down_proj.zero_()
        assert_close(model(X).detach(), expected, 1e-12)
        assert not torch.allclose(twin(X), expected)
    assert "forward" not in vars(model.experts)


def test_a_layer_with_one_expert_is_linear():
    weight = torch.randn(1, O, I, dtype=torch.float64)
    there = sent(X[0], torch.zeros(7, dtype=torch.long))
    assert_close(routed_linear(there, weight), F.linear(X[0], weight[0]), 1e-12)
