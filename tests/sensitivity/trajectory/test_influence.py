"""Influences along a record: against the leave-one-out walk, and against trainings without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.errors import EngramError
from engram.training.training import Training

NUM_DATA, STEPS = 24, 30


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(NUM_DATA + 6, 4).double()
    y = (x[:, 0] + 0.5 * x[:, 1] + 0.3 * torch.randn(len(x)) > 0).long()
    return (x[:NUM_DATA], y[:NUM_DATA]), (x[NUM_DATA:], y[NUM_DATA:])


def trained(
    weights: Tensor, optimizer: type[torch.optim.Optimizer], rate: float
) -> tuple[nn.Module, Training]:
    """A small net stopped early, whose examples have these weights in the mean loss."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    stepper = optimizer(net.parameters(), lr=rate)
    training = engram.record(stepper, net)
    (x, y), _ = data()
    for _ in range(STEPS):
        stepper.zero_grad()
        (functional.cross_entropy(net(x), y, reduction="none") * weights).mean().backward()
        stepper.step()
    return net.eval(), training


CASES = [(torch.optim.SGD, 0.5), (torch.optim.Adam, 0.02)]


@pytest.mark.parametrize("structure", ["full", "kronecker"])
@pytest.mark.parametrize(("optimizer", "rate"), CASES)
def test_on_itself_it_is_the_leave_one_out_deviation(
    structure: str, optimizer: type[torch.optim.Optimizer], rate: float
) -> None:
    net, training = trained(torch.ones(NUM_DATA), optimizer, rate)
    train, _ = data()
    posterior = engram.laplace(net, train, structure=structure, training=training)
    found = engram.influence(net, train, train, posterior).diagonal()
    result = engram.sensitivities(net, train, posterior)
    residual = result.outputs.softmax(1) - functional.one_hot(train[1], 2)
    torch.testing.assert_close(found, (residual * result.deviation).sum(1), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", ["full", "kronecker"])
@pytest.mark.parametrize(("optimizer", "rate"), CASES)
def test_against_trainings_without_the_example(
    structure: str, optimizer: type[torch.optim.Optimizer], rate: float
) -> None:
    train, test = data()
    net, training = trained(torch.ones(NUM_DATA), optimizer, rate)
    posterior = engram.laplace(net, train, structure=structure, training=training)
    before = functional.cross_entropy(net(test[0]), test[1], reduction="none").detach()
    truth = []
    for left_out in range(NUM_DATA):
        weights = torch.ones(NUM_DATA)
        weights[left_out] = 0
        without, _ = trained(weights, optimizer, rate)
        after = functional.cross_entropy(without(test[0]), test[1], reduction="none")
        truth.append((after - before).detach())
    true = torch.stack(truth).flatten()

    def error(estimator: str) -> float:
        found = engram.influence(net, train, test, posterior, estimator=estimator).flatten()
        return float((found - true).norm() / true.norm())

    along, end = error("trajectory"), error("linear")
    assert along < end
    if (structure, optimizer) == ("full", torch.optim.SGD):
        assert along < 0.35  # elsewhere the blocks, or a preconditioner that moves too, are left


def test_batches_make_no_difference() -> None:
    net, training = trained(torch.ones(NUM_DATA), torch.optim.Adam, 0.02)
    train, test = data()
    posterior = engram.laplace(net, train, structure="kronecker", training=training)
    whole = engram.influence(net, train, test, posterior)
    parts = engram.influence(net, train, test, posterior, batch_size=5)
    torch.testing.assert_close(whole, parts)


def test_without_a_record_there_is_no_trajectory() -> None:
    net, _ = trained(torch.ones(NUM_DATA), torch.optim.SGD, 0.5)
    train, test = data()
    posterior = engram.laplace(net, train, prior_precision=1.0)
    with pytest.raises(EngramError, match="recorded training"):
        engram.influence(net, train, test, posterior, estimator="trajectory")
    with pytest.raises(EngramError, match="one of auto, linear, trajectory"):
        engram.influence(net, train, test, posterior, estimator="paper")
