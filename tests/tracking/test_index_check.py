"""A step has the examples that it announces: whatever else comes is refused and not counted."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import engram
from engram.errors import ArgumentError, DataError, EngineError, ModelMismatchError
from streamed import BATCH, NUM_DATA, backward, build, data

FIRST = torch.arange(BATCH)


def alike() -> tuple[Tensor, Tensor]:
    """Examples of one class: gradients cannot tell them apart by their targets."""
    return data()[0], torch.zeros(NUM_DATA, dtype=torch.long)


def stepped(tracker: engram.Tracker, indices: Any, rows: Tensor, targets: Any = None) -> None:
    x, y = alike()
    with tracker.step(indices, targets):
        functional.cross_entropy(tracker.model(x[rows]), y[rows]).backward()


@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_a_permuted_batch_is_refused(table: bool, with_targets: bool) -> None:
    model, optimizer = build()
    held = alike() if table else TensorDataset(*alike())
    tracker = engram.Tracker(model, optimizer, held)
    targets = alike()[1][FIRST] if with_targets else None
    swapped = FIRST.clone()
    swapped[[2, 5]] = FIRST[[5, 2]]
    for indices in (FIRST.flip(0), swapped):
        with pytest.raises(DataError, match="belong together"):
            stepped(tracker, indices, FIRST, targets)
    assert tracker.stream.epoch.seen == 0
    stepped(tracker, FIRST, FIRST, targets)
    assert tracker.stream.epoch.seen == BATCH


def test_one_wrong_index_is_found_in_data_held_in_memory() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, alike())
    wrong = FIRST.clone()
    wrong[3] = NUM_DATA - 1
    with pytest.raises(DataError, match=rf"example {NUM_DATA - 1} in row 3; got example 3 there"):
        stepped(tracker, wrong, FIRST)
    named = {"x": alike()[0], "labels": alike()[1]}
    tracker = engram.Tracker(Named(model), optimizer, named)
    outcome, labels = tracker.model, named["labels"][FIRST]
    with pytest.raises(DataError, match="got example 3 there"), tracker.step(wrong):
        functional.cross_entropy(outcome(x=named["x"][FIRST]), labels).backward()


class Named(nn.Module):
    """Takes rows of any shape and type."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x.flatten(1).double())
        return output


def test_inputs_that_are_changed_on_the_way_are_the_users() -> None:
    """Noise, another type, flattened rows: no row is another example's."""
    net, optimizer = build()
    model, (x, y) = Named(net), alike()
    tracker = engram.Tracker(model, optimizer, (x.float().reshape(NUM_DATA, 2, 2), y))
    with tracker.step(FIRST):
        functional.cross_entropy(model(x[FIRST].float().double()), y[FIRST]).backward()
    with pytest.raises(DataError, match="belong together"), tracker.step(FIRST.flip(0)):
        functional.cross_entropy(model(x[FIRST].float().double()), y[FIRST]).backward()
    with tracker.step(FIRST + BATCH):
        functional.cross_entropy(model(x[FIRST + BATCH] + 0.01), y[FIRST]).backward()
    assert tracker.stream.epoch.seen == 2 * BATCH


class Augmented(Dataset[Any]):
    """Draws from every generator there is when an example is read."""

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = data()
        noise = torch.rand(1) + random.random() + np.random.rand()
        return x[index] + 1e-3 * noise, y[index]


def test_reading_examples_again_draws_no_random_numbers() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, Augmented())
    tracker.stream._prepared()
    draws = []
    for streamed in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if streamed:
            with tracker.step(FIRST):
                backward(model, FIRST)
        draws.append((float(torch.rand(1)), random.random(), float(np.random.rand())))
    assert draws[0] == draws[1]


def test_a_step_inside_a_step_is_refused() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    with (
        pytest.raises(EngineError, match="a step outside of a step"),
        tracker.step(FIRST),
        tracker.step(FIRST + BATCH),
    ):
        backward(model, FIRST)
    with pytest.raises(EngineError, match="an update outside of a step"), tracker.step(FIRST):
        tracker.update()
    ending = pytest.raises(EngineError, match="the end of an epoch outside of a step")
    with ending, tracker.step(FIRST):
        tracker.finish_epoch()
    assert tracker.stream.epoch.seen == 0
    assert not model._forward_hooks
    with tracker.step(FIRST):
        backward(model, FIRST)
    assert tracker.stream.epoch.seen == BATCH


def test_a_step_that_never_ends_is_noticed_and_can_be_left() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    begun = tracker.step(FIRST)
    begun.__enter__()
    with pytest.raises(EngineError, match="never ended"), tracker.step(FIRST):
        pass
    assert model._forward_hooks
    tracker.leave_step()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    begun.__exit__(None, None, None)
    assert tracker.stream.epoch.seen == 0
    with tracker.step(FIRST):
        backward(model, FIRST)
    tracker.step(FIRST).__enter__()  # nobody keeps it: it ends with its last reference
    assert not model._forward_hooks


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_an_interrupted_step_leaves_nothing(error: type[BaseException]) -> None:
    model, optimizer = build("dropout")
    tracker = engram.Tracker(model, optimizer, data(), held_out=4)

    def interrupted(outputs: Tensor) -> None:
        raise error

    with pytest.raises(error), tracker.step(FIRST):
        interrupted(model(data()[0][FIRST]))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.overrides._get_current_function_mode() is None
    assert tracker.stream.epoch.seen == 0
    with tracker.step(FIRST):
        backward(model, FIRST)
    assert tracker.stream.epoch.seen == BATCH


def test_a_closed_tracker_keeps_its_history_and_nothing_else() -> None:
    model, optimizer = build()
    with engram.Tracker(model, optimizer, data(), held_out=4) as tracker:
        for batch in torch.arange(NUM_DATA).split(BATCH):
            with tracker.step(batch):
                backward(model, batch)
            optimizer.step()
        assert optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert len(tracker.history) == 1
    for call in (tracker.update, tracker.step(FIRST).__enter__, tracker.twin_step(FIRST).__enter__):
        with pytest.raises(ArgumentError, match="one that was closed"):
            call()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "1", True, None])
def test_a_scale_is_a_positive_number(scale: Any) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    with pytest.raises(ArgumentError, match="scale"), tracker.step(FIRST, scale=scale):
        backward(model, FIRST)


class Growing(Dataset[Any]):
    count = NUM_DATA

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return data()[0][index % NUM_DATA], data()[1][index % NUM_DATA]


def test_data_that_grows_is_other_data() -> None:
    model, optimizer = build()
    backward(model, FIRST)
    optimizer.step()
    held = Growing()
    tracker = engram.Tracker(model, optimizer, held, held_out=4)
    held.count = NUM_DATA + 1
    for call in (tracker.update, tracker.step(FIRST).__enter__, tracker.twin_step(FIRST).__enter__):
        with pytest.raises(DataError, match=f"data of {NUM_DATA + 1} now"):
            call()


def test_parameters_change_between_epochs_and_not_inside_one() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    for batch in torch.arange(NUM_DATA).split(BATCH):
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    model[0].weight.requires_grad_(False)
    with tracker.step(FIRST):
        backward(model, FIRST)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ModelMismatchError, match=r"0\.weight.*finish_epoch"), tracker.step(FIRST):
        backward(model, FIRST)
    tracker.finish_epoch()
    with tracker.step(FIRST):
        backward(model, FIRST)
    model[2] = nn.Linear(5, 3).double()
    tracker.finish_epoch()
    for call in (tracker.update, tracker.posterior):
        with pytest.raises(ModelMismatchError, match=r"without 2\.weight, 2\.bias"):
            call()
    with pytest.raises(ModelMismatchError, match="several optimizers"):
        engram.Tracker(model, optimizer, data())
    optimizer.add_param_group({"params": model[2].parameters()})
    backward(model, FIRST)
    optimizer.step()
    assert tracker.update() is not None


def test_a_moving_average_is_of_the_same_parameters() -> None:
    model, optimizer = build()
    given: dict[str, Any] = {"posterior": "diagonal", "prior_precision": 1.0, "average": 0.9}
    tracker = engram.Tracker(model, optimizer, data(), **given)
    model[0].bias.requires_grad_(False)
    tracker.update()
    model[0].bias.requires_grad_(True)
    before = copy.deepcopy(tracker.source.state_dict())
    with pytest.raises(ModelMismatchError, match="moving average began with"):
        tracker.update()
    assert tracker.source.state_dict()["updates"] == before["updates"]
    model[0].bias.requires_grad_(False)
    assert tracker.update() is not None
