"""No gradient sum is made where nobody asks for one: counted in floating-point operations."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import engram
from engram.engine.gradient_accumulator import DiscardGradients, GradientAccumulator
from engram.engine.session import session
from engram.likelihoods import Categorical
from engram.sensitivity.estimators import ESTIMATORS
from engram.sensitivity.estimators.base import Setting

WIDE = 64


def operations(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.fixture(scope="module", params=["diagonal", "kronecker"])
def problem(request):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 40)).double()
    data = (torch.randn(32, WIDE).double(), torch.randint(0, 40, (32,)))
    return (
        model,
        data,
        engram.laplace(model, data, structure=request.param, progress=False, prior_precision=1.0),
    )


@pytest.fixture
def seen(problem):
    model, data, posterior = problem
    with session(model, data, "categorical", progress=False) as opened:
        yield opened.observe(next(iter(opened.batches))), posterior


def test_a_sum_costs_and_none_does_not(seen):
    (trace, seed), posterior = (seen[0].trace, seen[0].residual), seen[1]
    bare = operations(lambda: trace.deviation(seed, posterior))
    none = operations(lambda: trace.deviation(seed, posterior, DiscardGradients()))
    summed = operations(lambda: trace.deviation(seed, posterior, GradientAccumulator()))
    assert bare == none < summed
    assert operations(lambda: trace.add_gradient(seed, posterior, DiscardGradients())) == 0


@pytest.mark.parametrize("name", ["iterated", "corrected"])
def test_every_round_costs_what_a_deviation_does(seen, name):
    """One sum in all, however many rounds: with many outputs ``corrected`` goes round too."""
    observed, posterior = seen
    trace, seed = observed.trace, observed.residual

    def rule(total):
        ESTIMATORS[name](observed, Setting(Categorical(), posterior, 5, total))

    with_sum, without = (
        operations(lambda: rule(GradientAccumulator())),
        operations(lambda: rule(DiscardGradients())),
    )
    once = operations(lambda: trace.deviation(seed, posterior))
    if name == "corrected":
        extra = operations(lambda: trace.add_gradient(seed, posterior, GradientAccumulator()))
    else:
        extra = operations(lambda: trace.deviation(seed, posterior, GradientAccumulator())) - once
    assert with_sum - without == extra > 0
    assert without % once == 0
