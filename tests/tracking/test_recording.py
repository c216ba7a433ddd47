"""A tracker records the training that it follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from streamed import NUM_DATA, backward, batches, build, data


def test_a_tracker_records_and_its_steps_name_examples() -> None:
    model, optimizer = build()
    x, y = data()
    losses = torch.zeros(NUM_DATA, dtype=x.dtype)
    with engram.Tracker(model, optimizer, (x, y)) as tracker:
        assert tracker.training is not None
        assert tracker.training.is_recording
        plan = batches(3)
        for batch in plan:
            with torch.no_grad():
                losses[batch] += functional.cross_entropy(
                    model(x[batch]), y[batch], reduction="none"
                )
            optimizer.zero_grad()
            with tracker.step(batch):
                backward(model, batch)
            optimizer.step()
    training = tracker.training
    assert not training.is_recording
    assert not optimizer._optimizer_step_post_hooks
    assert training.num_steps == len(plan)
    assert training.visits is not None
    assert training.visits.count.tolist() == [3] * NUM_DATA
    torch.testing.assert_close(training.visits.prequential(), losses / 3)
    segments = training.of(model).segments(2)
    assert segments[0].visits is not None


def test_a_record_of_the_users_is_taken_and_stays() -> None:
    model, optimizer = build()
    own = engram.record(optimizer, model)
    with engram.Tracker(model, optimizer, data()) as tracker:
        assert tracker.training is own
        with tracker.step(torch.arange(8)):
            backward(model, torch.arange(8))
        optimizer.step()
    assert own.is_recording
    assert own.num_steps == 1
    assert own.visits is not None
    assert int(own.visits.count.sum()) == 8


def test_a_recorded_loader_names_examples_once() -> None:
    model, optimizer = build()
    x, y = data()
    loader = DataLoader(TensorDataset(torch.arange(NUM_DATA)), batch_size=8, shuffle=True)
    own = engram.record(optimizer, model, loader=loader)
    tracker = engram.Tracker(model, optimizer, (x, y))
    for (batch,) in loader:
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    assert own.visits is not None
    assert own.visits.with_targets is False
    assert own.visits.count.tolist() == [1] * NUM_DATA


def test_two_trackers_share_a_record() -> None:
    model, optimizer = build()
    first, second = (engram.Tracker(model, optimizer, data()) for _ in range(2))
    assert first.training is second.training is not None


class Unknown(torch.optim.Optimizer):
    """A rule that nobody has described."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad.sign()


def test_an_optimizer_that_cannot_be_recorded_is_tracked_all_the_same() -> None:
    model, _ = build()
    optimizer = Unknown(model.parameters())
    tracker = engram.Tracker(model, optimizer, data(), posterior="diagonal", prior_precision=1.0)
    assert tracker.training is None
    with tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))
    optimizer.step()
    tracker.close()


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_the_trackers_likelihood_is_the_records(likelihood: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    y = (x[:, :1] > 0).float()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    own = engram.record(optimizer, model)
    tracker = engram.Tracker(model, optimizer, (x, y), likelihood=likelihood)
    with tracker.step(torch.arange(8)):
        outputs = model(x)
        loss = (
            functional.mse_loss(outputs, y) / 2
            if likelihood == "gaussian"
            else functional.binary_cross_entropy_with_logits(outputs, y)
        )
        loss.backward()
    assert own.visits is not None
    used = engram.likelihoods.resolve(likelihood)
    torch.testing.assert_close(own.visits.prequential(), used.loss(outputs, y).detach())
