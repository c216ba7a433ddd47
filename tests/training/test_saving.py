"""A record goes on in another process, and is saved and loaded."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import engram
from engram.errors import ModelMismatchError, StorageError, TrainingError

INPUTS = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, Any] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(INPUTS), INPUTS[:, :2]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()


def same(one: engram.Training, two: engram.Training, model: nn.Module) -> None:
    left, right = one.of(model), two.of(model)
    for name, time in left.time.items():
        torch.testing.assert_close(right.time[name], time)
        torch.testing.assert_close(right.decay[name], left.decay[name])
    assert left.moved == right.moved
    for a, b in zip(left.segments(4), right.segments(4), strict=True):
        assert (a.start, a.end, a.middle.step) == (b.start, b.end, b.middle.step)
        for name, value in a.middle.weights.items():
            torch.testing.assert_close(b.middle.weights[name], value)


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_as_if_never_stopped(kind: str, in_folder: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run" if in_folder else None
    straight, first = net(), net()
    optimizers = [KINDS[kind](model.parameters()) for model in (straight, first)]
    whole = engram.record(optimizers[0], straight)
    part = engram.record(optimizers[1], first, folder=folder)
    step(straight, optimizers[0], 150)
    step(first, optimizers[1], 70)
    file = io.BytesIO()
    saved = {"model": first.state_dict(), "optimizer": optimizers[1].state_dict()}
    torch.save(saved | {"training": part.state_dict()}, file)
    step(first, optimizers[1], 35)  # what was saved does not change with it
    del first, part, optimizers[1]

    file.seek(0)
    found = torch.load(file, weights_only=True)
    second = net()
    second.load_state_dict(found["model"])
    optimizer = KINDS[kind](second.parameters())
    optimizer.load_state_dict(found["optimizer"])
    training = engram.record(optimizer, second, folder=folder)
    training.load_state_dict(found["training"])
    step(second, optimizer, 80)
    assert (training.num_steps, training.num_missing_steps) == (150, 0)
    if in_folder:
        assert training.of(second).segments(1)[0].end == 150
        return
    same(whole, training, second)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = net()
    optimizer = KINDS[kind](model.parameters())
    training = engram.record(optimizer)
    step(model, optimizer, 50)
    training.save(tmp_path / "run")
    loaded = engram.load(tmp_path / "run")
    assert repr(loaded) == repr(training)
    same(training, loaded, model)
    same(training, loaded, copy.deepcopy(model))
    again = Path(loaded.save(tmp_path / "again"))
    same(training, engram.load(again), model)


def test_names_find_parameters_in_groups_of_another_order(tmp_path: Path) -> None:
    model = net()
    groups = [{"params": [p for p in model.parameters() if p.dim() == d]} for d in (1, 2)]
    optimizer = SGD([groups[0], {**groups[1], "lr": 0.3}], lr=0.1)
    training = engram.record(optimizer, model)
    step(model, optimizer, 3)
    time = engram.load(training.save(tmp_path)).of(copy.deepcopy(model)).time
    assert time["0.bias"].item() < time["0.weight"].item()
    training.names = None
    with pytest.raises(ModelMismatchError, match=r"name its parameters with engram\.record"):
        engram.load(training.save(tmp_path)).of(copy.deepcopy(model))


def test_checkpoints_that_are_gone_or_others_are_told(tmp_path: Path) -> None:
    model = net()
    optimizer = KINDS["adam"](model.parameters())
    training = engram.record(optimizer, model, folder=tmp_path)
    step(model, optimizer, 30)
    state = training.state_dict()
    training.stop()
    segment = training.of(model).segments(2)[0]
    file = segment.last.snapshot.file
    assert file is not None
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match="with another content"):
        _ = segment.last.weights
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(StorageError, match=r"with its 4 checkpoints; got none of them"):
        engram.record(optimizer, model, folder=tmp_path).load_state_dict(state)
    with pytest.raises(StorageError, match="the checkpoint of step 0; got no file"):
        training.save(tmp_path / "other")


def test_another_optimizer_or_model_or_moment_is_refused() -> None:
    model = net()
    optimizer = KINDS["adam"](model.parameters())
    training = engram.record(optimizer, model)
    step(model, optimizer, 10)
    state = training.state_dict()
    other = engram.record(KINDS["sgd"](model.parameters()))
    with pytest.raises(ModelMismatchError, match=r"a SGD over 6 .* got that of a Adam over 6"):
        other.load_state_dict(state)
    small = nn.Linear(2, 2)
    with pytest.raises(ModelMismatchError, match="over 2 parameters"):
        engram.record(KINDS["adam"](small.parameters())).load_state_dict(state)
    with pytest.raises(StorageError, match="clocks"):
        training.load_state_dict({})
    behind = net()
    late = KINDS["adam"](behind.parameters())
    step(behind, late, 4)
    with pytest.raises(TrainingError, match=r"the 4 steps .* got one of 10"):
        engram.record(late, behind).load_state_dict(state)
    step(model, optimizer, 3)
    training.stop()
    resumed = engram.record(optimizer, model)
    resumed.load_state_dict(state)
    assert (resumed.num_steps, resumed.num_missing_steps) == (10, 3)
