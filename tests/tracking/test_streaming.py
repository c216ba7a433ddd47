"""Streamed steps: the sensitivities of the visit, and a training that does not notice."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import ivon
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.errors import ArgumentError, EngineError
from engram.optimizers.ivon import sampled
from streamed import (
    BATCH,
    MODELS,
    NUM_DATA,
    backward,
    batches,
    build,
    data,
    dense_deviation,
    thinned,
)


@pytest.mark.parametrize("name", MODELS)
def test_a_streamed_step_is_the_dense_answer_at_the_visit(name: str) -> None:
    model, optimizer = build(name)
    tracker = engram.Tracker(model, optimizer, data())
    for number, batch in enumerate(batches(1)[:2]):
        optimizer.zero_grad()
        before = copy.deepcopy(model)
        torch.manual_seed(number)
        with tracker.step(batch):
            backward(model, batch)
        if number == 1:
            posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
            precision = torch.cat([b.precision.flatten() for b in posterior.blocks])
            expected = dense_deviation(before, batch, number, precision)
            outputs = thinned(before, number)(data()[0][batch]).detach()
        optimizer.step()
    assert tracker.stream.way == MODELS[name][1]
    moved = outputs + expected
    loo = functional.cross_entropy(moved, data()[1][batch], reduction="none")
    score = (moved.softmax(1) - outputs.softmax(1)).abs().sum(1)
    epoch = tracker.stream.epoch
    assert torch.allclose(epoch.loo_loss[batch], loo.float(), rtol=1e-5, atol=1e-7)
    assert torch.allclose(epoch.score[batch], score.float(), rtol=1e-4, atol=1e-7)
    assert epoch.visited[batch].tolist() == [1] * BATCH


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_for_bit_the_same(name: str) -> None:
    trained = []
    for streamed in (False, True):
        model, optimizer = build(name)
        model.float()
        inputs, targets = data()[0].float(), data()[1]
        tracker = engram.Tracker(model, optimizer, (inputs, targets))
        torch.manual_seed(3)
        gradients = []
        for batch in batches(2):
            optimizer.zero_grad()
            with tracker.step(batch) if streamed else nullcontext():
                outputs = model(inputs[batch])
                functional.cross_entropy(outputs, targets[batch]).backward()
            gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        trained.append([*gradients, *model.parameters(), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_nothing_is_left_on_the_model() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    with pytest.raises(RuntimeError, match="cannot be multiplied"), tracker.step(torch.arange(8)):
        model(data()[0][:8, :3])
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert model.training
    assert tracker.stream.epoch.seen == 0


def test_an_epoch_ends_by_itself_or_when_told() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), validation=data())
    for batch in batches(2):
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    assert len(tracker.history) == 2
    record = tracker.finish_epoch(step=17)
    assert len(tracker.history) == 2
    assert tracker.history.records[-1].step == record.step == 17
    assert record.streamed
    epoch = tracker.last_epoch
    assert epoch is not None
    assert record.estimate == pytest.approx(float(epoch.loo_loss.double().mean()))
    assert record.train == pytest.approx(float(epoch.loss.double().mean()))
    assert math.isfinite(record.validation)
    assert tracker.history.score_matrix()[-1].equal(epoch.score)
    with tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))
    assert tracker.finish_epoch().estimate == pytest.approx(
        float(tracker.last_epoch.loo_loss[:8].double().mean())
    )
    assert len(tracker.history) == 3


def test_before_the_first_step_of_the_optimizer_there_is_only_a_loss() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    first = batches(1)[0]
    with tracker.step(first):
        backward(model, first)
    epoch = tracker.stream.epoch
    assert epoch.status[first].tolist() == [1] * BATCH
    assert torch.isfinite(epoch.loss[first]).all()
    assert epoch.loo_loss.isnan().all()


def test_a_loader_gives_the_indices() -> None:
    model, optimizer = build()
    dataset = TensorDataset(*data())
    tracker = engram.Tracker(model, optimizer, dataset)
    loader = DataLoader(tracker.indexed(), batch_size=5, shuffle=True)
    for indices, x, y in loader:
        optimizer.zero_grad()
        with tracker.step(indices, y):
            functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(tracker.history) == 1


def test_ivon_is_seen_at_its_sample() -> None:
    """A one-sample estimate of the expectation: the sampled weights, the precision as it is."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=NUM_DATA, weight_decay=0.1, hess_init=0.5)
    tracker = engram.Tracker(model, optimizer, data(), prior_precision=2.4)
    for batch in batches(1):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            drawn = copy.deepcopy(model)
            with tracker.step(batch):
                backward(model, batch)
        precision = optimizer.param_groups[0]["ess"] * (optimizer.param_groups[0]["hess"] + 0.1)
        expected = dense_deviation(drawn, batch, 0, precision)
        outputs = drawn(data()[0][batch]).detach()
        optimizer.step()
    loo = functional.cross_entropy(outputs + expected, data()[1][batch], reduction="none")
    assert torch.allclose(tracker.last_epoch.loo_loss[batch], loo.float(), rtol=1e-5)


def test_curvature_is_fitted_at_the_start_of_an_epoch() -> None:
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"posterior": "kronecker", "prior_precision": 0.5, "average": 0.5}
    tracker = engram.Tracker(model, optimizer, data(), **settings)
    posterior = engram.laplace(model, data(), structure="kronecker", prior_precision=0.5)
    expected = engram.sensitivities(model, data(), posterior, estimator="linear", progress=False)
    for batch in batches(1):
        with tracker.step(batch):
            backward(model, batch)  # no step of the optimizer: the weights stay
    assert torch.allclose(tracker.last_epoch.loo_loss, expected.loo_loss.float(), rtol=1e-5)


def test_ivon_streams_inside_its_guard_and_validates_at_the_mean() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=NUM_DATA, weight_decay=0.1)
    tracker = engram.Tracker(model, optimizer, data(), validation=data())
    for batch in batches(2):
        with sampled(optimizer):
            optimizer.zero_grad()
            drawn = model.weight.detach().clone()
            with tracker.step(batch):
                backward(model, batch)
            assert model.weight.equal(drawn)
        at_mean = functional.cross_entropy(model(data()[0]), data()[1]).item()
        optimizer.step()
    assert tracker.last_epoch.all_seen
    assert tracker.history.records[-1].validation == pytest.approx(at_mean, rel=1e-9)
    optimizer.zero_grad()
    with (
        pytest.raises(EngineError, match=r"ivon\.sampled"),
        tracker.step(torch.arange(8)),
        sampled(optimizer),
    ):
        backward(model, torch.arange(8))


class Averaging(nn.Module):
    """A buffer that moves in every forward pass, and a bare parameter without a rule: run again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) / self.scale
        if self.training:
            self.average.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        output: Tensor = self.head((hidden - self.average).tanh())
        return output


def test_buffers_move_as_they_would_without_a_second_pass() -> None:
    found = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model = Averaging().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)
        tracker = engram.Tracker(model, optimizer, data())
        for batch in batches(2):
            optimizer.zero_grad()
            with tracker.step(batch) if streamed else nullcontext():
                backward(model, batch)
            optimizer.step()
        found.append(model.state_dict())
    assert tracker.stream.way == "again"
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


def test_listeners_and_history_have_the_same_step() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    told: list[int] = []
    tracker.listeners.append(lambda record, scores: told.append(record.step))
    for batch in batches(1):
        with tracker.step(batch, epoch=7):
            backward(model, batch)
        optimizer.step()
    tracker.update(step=9)
    assert tracker.finish_epoch(step=7).step == 7
    with pytest.raises(ArgumentError, match="epoch="):
        tracker.finish_epoch(step=8)
    assert tracker.history.to_frame().index.tolist() == told == [7, 9]
    tracker.listeners.clear()
    assert tracker.finish_epoch(step=8).step == 8
    assert tracker.history.to_frame().index.tolist() == [8, 9]


def test_a_state_without_steps_is_waited_for() -> None:
    """Adagrad holds sums of squares, all zero, before its first step."""
    model, _ = build()
    optimizer = torch.optim.Adagrad(model.parameters())
    tracker = engram.Tracker(model, optimizer, data(), prior_precision=1.0)
    for batch in batches(1):
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    assert tracker.last_epoch is not None
    score = tracker.last_epoch.score
    assert score[batches(1)[0]].isnan().all()
    assert score[batches(1)[-1]].isfinite().all()
