"""Stacks in single precision: the same numbers, less exactly, and the stack itself untouched."""

import pytest
import torch
from torch import nn

from engram.core.state.model import state_preserved
from engram.likelihoods import Categorical, from_loss
from engram.retraining.hessian_at import HessianAt
from engram.retraining.in_single import in_single
from engram.retraining.open_stack import open_stack
from retraining_problems import classifier


class Written(nn.Module):
    """Double precision is written into it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x.double())


@pytest.fixture
def data():
    _, x, y = classifier()
    return x, y


def test_products_differ_by_rounding_alone(data):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with state_preserved(net):
        stack = open_stack(net, data, Categorical(), 0.5)
        single = in_single(stack)
        vectors = torch.randn(6, len(stack.start), dtype=torch.float64)
        exact = HessianAt(stack, stack.start, 6)(vectors)
        found = HessianAt(single, single.start, 6)(vectors.float())
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 1e-5 * exact.abs().max()
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert stack.batch.inputs[0].dtype == torch.float64


def test_a_loss_with_double_written_into_it_keeps_the_stack(data):
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, weight=weight, reduction="none")

    net = nn.Linear(4, 3).double()
    with state_preserved(net):
        stack = open_stack(net, data, from_loss(loss), 0.5)
        assert in_single(stack) is stack


@pytest.mark.parametrize("net", [Written().double(), nn.Linear(4, 3)], ids=["written", "single"])
def test_a_stack_that_has_no_other_is_its_own(net, data):
    x, y = data
    kept = x.to(next(net.parameters()).dtype)
    with state_preserved(net):
        stack = open_stack(net, (kept, y), Categorical(), 0.5)
        assert in_single(stack) is stack
