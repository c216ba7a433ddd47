"""Streaming beside the loops that people write, against Jacobians at the visited weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError, PosteriorError
from streamed import BATCH, NUM_DATA, backward, batches, build, data

Step = Callable[[Tensor], None]


def dense(model: nn.Module, batch: Tensor, posterior: engram.Posterior) -> Tensor:
    """Leave-one-out losses of a batch at the present weights, [B]."""
    x, y = data()
    covered = {n: p for n, p in model.named_parameters() if n in posterior.block_of}
    ones = {n: torch.ones_like(p) for n, p in covered.items()}
    precision = torch.cat([v.flatten() for v in posterior.multiply(ones).values()])
    outputs = model(x[batch])
    error = (outputs.softmax(1) - functional.one_hot(y[batch], 3)).detach()
    moved = []
    for row, e in zip(outputs, error, strict=True):
        parts = [torch.autograd.grad(f, list(covered.values()), retain_graph=True) for f in row]
        jacobian = torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])
        moved.append(row.detach() + (jacobian / precision) @ (jacobian.mT @ e))
    return functional.cross_entropy(torch.stack(moved), y[batch], reduction="none")


def compared(
    model: nn.Module, optimizer: Any, run: Callable[[engram.Tracker, Tensor], None], **given: Any
) -> engram.Tracker:
    """Stream an epoch and a half; the last visits must be the dense answers."""
    tracker = engram.Tracker(model, optimizer, data(), **({"posterior": "optimizer"} | given))
    for batch in batches(2)[: NUM_DATA // BATCH + 1]:
        expected = None
        if optimizer.state:
            expected = dense(model, batch, tracker.posterior())
        run(tracker, batch)
    assert expected is not None
    found = tracker.stream.epoch.loo_loss[batch]
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    return tracker


def test_accumulated_batches() -> None:
    model, optimizer = build()

    def run(tracker: engram.Tracker, batch: Tensor) -> None:
        for half in batch.split(BATCH // 2):
            with tracker.step(half, scale=0.5):
                (functional.cross_entropy(model(data()[0][half]), data()[1][half]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    compared(model, optimizer, run)


def test_a_gradient_scaler() -> None:
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def run(tracker: engram.Tracker, batch: Tensor) -> None:
        optimizer.zero_grad()
        with tracker.step(batch, scale=scaler.get_scale()):
            loss = functional.cross_entropy(model(data()[0][batch]), data()[1][batch])
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    tracker = compared(model, optimizer, run)
    wrong = pytest.raises(ArgumentError, match="a gradient scaler")
    with wrong, tracker.step(torch.arange(BATCH)):
        scaler.scale(functional.cross_entropy(model(data()[0][:8]), data()[1][:8])).backward()


@pytest.mark.parametrize("held_out", [None, 4])
def test_an_optimizer_that_maximises_takes_minus_the_loss(held_out: int | None) -> None:
    def record(sign: float) -> tuple[Tensor, list[float]]:
        model, _ = build()
        settings = {"lr": 0.05, "weight_decay": 0.01, "maximize": sign < 0}
        optimizer = torch.optim.Adam(model.parameters(), **settings)
        tracker = engram.Tracker(model, optimizer, data(), held_out=held_out)
        for batch in batches(2):
            optimizer.zero_grad()
            with tracker.step(batch):
                loss = functional.cross_entropy(model(data()[0][batch]), data()[1][batch])
                (sign * loss).backward()
            optimizer.step()
        assert tracker.last_epoch is not None
        return tracker.last_epoch.loo_loss, [record.estimate for record in tracker.history]

    (plus, history), (minus, other) = record(1.0), record(-1.0)
    torch.testing.assert_close(plus, minus)
    assert history == pytest.approx(other)


def test_an_optimizer_that_maximises_the_loss_itself_is_refused() -> None:
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    tracker = engram.Tracker(model, optimizer, data())
    with pytest.raises(ArgumentError, match=r"-0\.125 times"), tracker.step(torch.arange(BATCH)):
        backward(model, torch.arange(BATCH))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    mixed = torch.optim.SGD(groups, lr=0.1)
    mixed.param_groups[0]["maximize"] = True
    tracker = engram.Tracker(model, mixed, data())
    with pytest.raises(ArgumentError, match="in some groups only"), tracker.step([0]):
        backward(model, torch.arange(1))


def test_a_closure_is_a_step_of_its_own() -> None:
    """L-BFGS holds no precision to read; with a fitted one every evaluation is a visit."""
    model, _ = build()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with pytest.raises(PosteriorError, match="LBFGS"):
        engram.Tracker(model, optimizer, data())
    given = {"posterior": "diagonal", "prior_precision": 1.0}
    tracker, everything = engram.Tracker(model, optimizer, data(), **given), torch.arange(NUM_DATA)
    expected = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        at = {"structure": "diagonal", "prior_precision": 1.0, "progress": False}
        expected.append(dense(model, everything, engram.laplace(model, data(), **at)))
        with tracker.step(everything):
            loss = functional.cross_entropy(model(data()[0]), data()[1])
            loss.backward()
        return loss

    optimizer.step(closure)
    assert len(tracker.history) == len(expected) > 1
    assert tracker.last_epoch is not None
    torch.testing.assert_close(tracker.last_epoch.loo_loss, expected[-1].float())


class Unused(nn.Module):
    """A layer that the loss does not depend on: its parameters never get a state."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.used(x)
        return output


def test_parameters_without_a_state_count_as_fixed() -> None:
    model = Unused().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)

    def run(tracker: engram.Tracker, batch: Tensor) -> None:
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()

    tracker = compared(model, optimizer, run)
    assert tracker.posterior().settings["not_stepped"] == ["spare.weight", "spare.bias"]


def test_what_was_not_visited_has_no_numbers() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    tracker.stream._prepared()
    visited = [torch.arange(8), torch.arange(4, 12), torch.arange(8)]
    for batch in visited:
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    record = tracker.finish_epoch()
    epoch = tracker.last_epoch
    assert epoch is not None
    assert epoch.visits.tolist() == [2] * 4 + [3] * 4 + [1] * 4 + [0] * 12
    assert epoch.visited.tolist() == [2] * 8 + [1] * 4 + [-1] * 12
    for name in ("loss", "loo_loss", "score"):
        assert getattr(epoch, name)[12:].isnan().all()
        assert getattr(epoch, name)[:12].isfinite().all()
    assert record.examples == 12
    assert record.estimate == pytest.approx(float(epoch.loo_loss[:12].double().mean()))
    assert repr(epoch) == (
        "Epoch(12 of 24 examples visited, 8 more than once, 12 with an estimate)"
    )
    with tracker.step(torch.arange(3)):  # a short epoch: nothing of the one before is in it
        backward(model, torch.arange(3))
    assert tracker.finish_epoch().examples == 3
    assert math.isnan(float(tracker.last_epoch.loss[5]))
    assert tracker.history.to_frame()["examples"].tolist() == [12, 3]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_epoch_may_end_in_any_mode(mode: Any) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    for _ in range(2):
        with tracker.step(torch.arange(BATCH)):
            backward(model, torch.arange(BATCH))
        optimizer.step()
        with mode():
            record = tracker.finish_epoch()
    assert record.examples == BATCH


def test_an_epoch_before_the_first_step_has_no_estimate() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), patience=1)
    for batch in torch.arange(NUM_DATA).split(BATCH):
        with tracker.step(batch):
            backward(model, batch)
    record = tracker.history.records[-1]
    assert (record.examples, record.finite, record.diverged) == (0, False, False)
    assert not tracker.should_stop
