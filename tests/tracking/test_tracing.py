"""Influence traced over a training, against a loop written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError
from engram.tracking.tracing import InfluenceTrace


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    train = (torch.randn(10, 3).double(), torch.arange(10) % 2)
    test = (torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0]))
    return model, train, test


def gradients(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    rows = []
    for x, y in zip(*data, strict=True):
        loss = functional.cross_entropy(model(x[None]), y[None])
        found = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()


def test_tracin_is_the_case_of_the_identity() -> None:
    model, train, test = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = engram.Tracker(model, optimizer, train, posterior="optimizer", prior_precision=1e-9)
    trace = InfluenceTrace.of(tracker, test)
    total = torch.zeros(10, 4).double()
    precision = float(
        tracker.posterior()
        .blocks[0]
        .multiply({"0.weight": torch.ones(4, 3).double()})["0.weight"][0, 0]
    )
    for _ in range(5):
        step(model, optimizer, train)
        trace.add()
        total += 0.1 * gradients(model, train) @ gradients(model, test).mT / precision
    torch.testing.assert_close(trace.values, total)
    best = total[:, 2].argmax()
    assert trace.top(2, 1)[0][0] == int(best)
    tracker.close()


def test_the_preconditioner_and_the_rates_are_those_of_the_steps() -> None:
    """Adam with a schedule and two groups; terms at every second step."""
    model, train, test = problem()
    groups = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters(), "lr": 0.05},
    ]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    chosen = [7, 2, 3]
    tracker = engram.Tracker(model, optimizer, train, posterior="optimizer", prior_precision=1.0)
    trace = InfluenceTrace.of(tracker, test, chosen)
    total, rates = torch.zeros(3, 4).double(), torch.zeros(2).double()
    sizes = [sum(p.numel() for p in model[k].parameters()) for k in (0, 2)]
    for number in range(6):
        step(model, optimizer, train)
        rates += torch.tensor([group["lr"] for group in optimizer.param_groups]).double()
        schedule.step()
        if number % 2:
            trace.add()
            second = torch.cat(
                [optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()]
            )
            precision = 10 * (second / (1 - 0.999 ** (number + 1))).sqrt() + 1.0
            each = torch.cat([rate.expand(n) for rate, n in zip(rates, sizes, strict=True)])
            own = gradients(model, (train[0][chosen], train[1][chosen]))
            total += own @ (each / precision * gradients(model, test)).mT
            rates = torch.zeros(2).double()
    assert trace.terms == 3
    torch.testing.assert_close(trace.values, total, rtol=1e-5, atol=1e-9)
    tracker.close()


def test_a_trace_follows_what_leaving_an_example_out_does() -> None:
    """One full-batch step each: the sum is the first-order change of the test losses."""
    model, train, test = problem()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tracker = engram.Tracker(model, optimizer, train, posterior="optimizer", prior_precision=1e-9)
    trace = InfluenceTrace.of(tracker, test)
    for _ in range(20):
        step(model, optimizer, train)
        trace.add()
    losses = functional.cross_entropy(model(test[0]), test[1], reduction="none").detach()
    changes = []
    for left in range(10):
        model.load_state_dict(start)
        again = torch.optim.SGD(model.parameters(), lr=0.05)
        kept = [i for i in range(10) if i != left]
        for _ in range(20):
            again.zero_grad()
            own = functional.cross_entropy(model(train[0][kept]), train[1][kept], reduction="sum")
            (own / 10).backward()
            again.step()
        without = functional.cross_entropy(model(test[0]), test[1], reduction="none").detach()
        changes.append(without - losses)
    true = torch.stack(changes)
    found = trace.values
    correlation = torch.corrcoef(torch.stack([found.flatten(), true.flatten()]))[0, 1]
    assert correlation > 0.98


def test_a_term_needs_a_step_and_closing_ends_it() -> None:
    model, train, test = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engram.Tracker(model, optimizer, train, posterior="optimizer") as tracker:
        trace = InfluenceTrace.of(tracker, test)
        with pytest.raises(ArgumentError, match="a step of the optimizer since the last term"):
            trace.add()
        step(model, optimizer, train)
        assert trace.is_due
        trace.add()
        trace.close()
    step(model, optimizer, train)
    assert not trace.is_due
    assert repr(trace) == "InfluenceTrace(10 examples x 4 test examples, 1 terms)"
    with pytest.raises(ArgumentError, match="indices from 0 to 9"):
        InfluenceTrace.of(tracker, test, [10])


def test_a_tracker_adds_a_term_at_every_update() -> None:
    model, train, test = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"trace": test, "trace_examples": [3, 1]}
    with engram.Tracker(
        model, optimizer, train, posterior="optimizer", prior_precision=1e-9, **chosen
    ) as tracker:
        assert tracker.trace is not None
        total = torch.zeros(2, 4).double()
        for number in range(3):
            step(model, optimizer, train)
            step(model, optimizer, train)
            tracker.update(step=number)
            own = gradients(model, (train[0][[3, 1]], train[1][[3, 1]]))
            unit = {n: torch.ones_like(p) for n, p in model.named_parameters()}
            scale = float(tracker.posterior().multiply(unit)["0.weight"][0, 0])
            total += 0.2 * own @ gradients(model, test).mT / scale
        torch.testing.assert_close(tracker.trace.values, total)
