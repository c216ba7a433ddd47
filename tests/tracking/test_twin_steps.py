"""What a twin makes of accumulation, closures, groups, statistics and misuse."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ivon import IVON
from torch import Tensor, nn, optim
from torch.nn import functional

from engram.errors import (
    ArgumentError,
    DataError,
    EngineError,
    LikelihoodError,
    PosteriorError,
)
from engram.optimizers import Newton
from engram.tracking.held_out_twin import HeldOutTwin
from streamed import BATCH, NUM_DATA, batches, data
from twins import assert_same, net, tracked, unchanged, without


def test_accumulated_clipped_and_skipped_steps() -> None:
    """A gradient that is clipped by a factor is clipped by the same factor in the twin."""
    x, y = data()
    model = net()
    reference = copy.deepcopy(model)
    first, second = optim.SGD(model.parameters(), 0.3), optim.SGD(reference.parameters(), 0.3)
    tracker = tracked(model, first)
    parts = batches(4)
    for number in range(0, len(parts), 2):
        first.zero_grad()
        second.zero_grad()
        for batch in parts[number : number + 2]:
            with tracker.twin_step(batch, y[batch], 0.5):
                (0.5 * functional.cross_entropy(model(x[batch]), y[batch])).backward()
            (0.5 * without(reference, batch, tracker.held_out.indices)).backward()
        if number == 4:  # a step that is not taken: its gradients are forgotten
            continue
        length = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.clamp(0.2 / length, max=1.0))
        first.step()
        second.step()
    found = tracker.held_out.twin.weights
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


def test_groups_frozen_parameters_and_those_that_come_later() -> None:
    x, y = data()
    model = net()
    reference = copy.deepcopy(model)

    def optimizer_of(owner: Any) -> optim.Optimizer:
        owner[0].bias.requires_grad_(False)
        groups = [{"params": [owner[2].weight], "lr": 0.01}, {"params": [owner[2].bias]}]
        return optim.AdamW(groups, lr=0.05)

    first, second = optimizer_of(model), optimizer_of(reference)
    tracker = tracked(model, first)
    for number, batch in enumerate(batches(3)):
        if number == 4:
            for owner, optimizer in ((model, first), (reference, second)):
                optimizer.add_param_group({"params": [owner[0].weight], "lr": 0.02})  # type: ignore[index]
        first.zero_grad()
        second.zero_grad()
        with tracker.twin_step(batch, y[batch], 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        without(reference, batch, tracker.held_out.indices).backward()
        first.step()
        second.step()
    assert set(tracker.held_out.twin.weights) == {"0.weight", "2.weight", "2.bias"}
    assert_same(tracker.held_out.twin, reference)


def test_steps_with_a_closure_and_a_summed_loss() -> None:
    x, y = data()
    model = net()
    reference = copy.deepcopy(model)
    first, second = optim.SGD(model.parameters(), 0.05), optim.SGD(reference.parameters(), 0.05)
    tracker = tracked(model, first, "sum")
    factors: list[Tensor] = []
    for batch in batches(2):

        def closure(batch: Tensor = batch) -> Tensor:
            first.zero_grad()
            with tracker.twin_step(batch, y[batch], 1.0):
                loss = functional.cross_entropy(model(x[batch]), y[batch], reduction="sum")
                loss.backward()
            factors.append(torch.clamp(3 / nn.utils.clip_grad_norm_(model.parameters(), 3), max=1))
            return loss

        first.step(closure)
        second.zero_grad()
        summed = len(batch) * without(reference, batch, tracker.held_out.indices)
        (factors[-1] * summed).backward()
        second.step()
    assert min(factors) < 1
    for name, weight in tracker.held_out.twin.weights.items():
        torch.testing.assert_close(weight, reference.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_batch_normalisation_has_statistics_of_its_own() -> None:
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    optimizer = optim.SGD(model.parameters(), 0.5)
    tracker = tracked(model, optimizer)
    start = tracker.held_out.twin.buffers["1.running_mean"].clone()
    for batch in batches(1):
        optimizer.zero_grad()
        with tracker.twin_step(batch, y[batch], 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    mine = model.get_buffer("1.running_mean")
    assert not tracker.held_out.twin.buffers["1.running_mean"].equal(start)
    assert not tracker.held_out.twin.buffers["1.running_mean"].equal(mine)
    with unchanged(model):
        before = mine.clone()
        tracker.held_out.twin.losses(
            tracker.held_out.batches, tracker.held_out.indices, tracker.held_out.likelihood
        )
        assert mine.equal(before)


def test_a_compiled_model() -> None:
    x, y = data()
    model = net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    tracker = tracked(model, optimizer)
    compiled = torch.compile(model, backend="eager")
    reference = copy.deepcopy(model)
    for batch in batches(1):
        with tracker.twin_step(batch, y[batch], 1.0):
            functional.cross_entropy(compiled(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        without(reference, batch, tracker.held_out.indices).backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert_same(tracker.held_out.twin, reference)


def test_the_hooks_go_with_the_twin() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    twin = HeldOutTwin(model, optimizer)
    assert optimizer._optimizer_step_post_hooks
    del twin
    gc.collect()
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("kind", ["IVON", "LBFGS", "Newton"])
def test_optimizers_that_need_more_than_gradients(kind: str) -> None:
    model = net()
    made: dict[str, Callable[[], optim.Optimizer]] = {
        "IVON": lambda: IVON(model.parameters(), lr=0.1, ess=NUM_DATA),
        "LBFGS": lambda: optim.LBFGS(model.parameters()),
        "Newton": lambda: Newton(model.parameters(), num_data=NUM_DATA, prior_precision=1.0),
    }
    with pytest.raises(PosteriorError, match="leave held_out out"):
        HeldOutTwin(model, made[kind]())


def test_steps_that_are_told_wrongly() -> None:
    x, y = data()
    model = net()
    tracker = tracked(model, optim.SGD(model.parameters(), 0.1))
    batch = torch.arange(BATCH)
    with (
        pytest.raises(LikelihoodError, match="other gradients"),
        tracker.twin_step(batch, None, 1.0),
    ):
        functional.cross_entropy(model(x[batch]), y[batch + 2]).backward()
    with pytest.raises(DataError, match="belong together"), tracker.twin_step(batch, None, 1.0):
        functional.cross_entropy(model(x[batch + 1]), y[batch + 2]).backward()
    with pytest.raises(ArgumentError, match="the sum over"), tracker.twin_step(batch, None, 1.0):
        functional.cross_entropy(model(x[batch]), y[batch], reduction="sum").backward()
    with (
        pytest.raises(EngineError, match="a call of the model"),
        tracker.twin_step(batch, None, 1.0),
    ):
        pass
    with (
        pytest.raises(ArgumentError, match="a batch without indices"),
        tracker.twin_step(None, None, 1.0),
    ):
        pass
    with pytest.raises(RuntimeError, match="mine"), tracker.twin_step(batch, None, 1.0):
        raise RuntimeError("mine")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
