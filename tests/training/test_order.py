"""With what ``replay=True`` keeps, training on from a checkpoint is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import engram
from engram.errors import ArgumentError, TrainingError
from engram.training.order import restore

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(96, 6, generator=GENERATOR)
LABELS = torch.randint(3, (96,), generator=GENERATOR)
KINDS: dict[str, Any] = {
    "adamw": lambda p: AdamW(p, lr=0.01),
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
    return nn.Sequential(*layers)


def backward(model: nn.Module, rows: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(INPUTS[rows]), LABELS[rows]).backward()


def trained(
    kind: str, accumulated: int = 1
) -> tuple[nn.Module, engram.Training, list[dict[str, Any]]]:
    """A loop as people write it: shuffles and dropout draw from torch's random numbers."""
    model = net()
    optimizer = KINDS[kind](model.parameters())
    training = engram.record(optimizer, model, replay=True)
    schedule = OneCycleLR(optimizer, 0.05, 80)
    states = []
    for _ in range(5 * accumulated):
        for number, rows in enumerate(DataLoader(torch.arange(96), batch_size=6, shuffle=True)):
            training.note(rows)
            backward(model, rows)
            if (number + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                states.append({k: v.clone() for k, v in model.state_dict().items()})
    return model, training, states


def replayed(training: engram.Training, kind: str, start: int) -> tuple[nn.Module, Optimizer]:
    model = net()
    optimizer = KINDS[kind](model.parameters())
    snapshot = next(s for s in training.grid.snapshots if s.step == start)
    assert training.order is not None
    named = training.of(model)
    checkpoint = next(
        c for s in named.segments(99) for c in (s.middle, s.last) if c.step == start or start == 0
    )
    if start:
        weights = checkpoint.weights | checkpoint.buffers
        model.load_state_dict(weights)
        restore(optimizer, snapshot)
    for step in range(start + 1, training.num_steps + 1):
        training.order.apply(step, optimizer)
        for part in training.order.of_step(step):
            if part.random_state is not None:
                torch.set_rng_state(part.random_state)
            backward(model, part.indices)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 32, 64])
def test_from_a_checkpoint_on_it_is_the_same_training(
    kind: str, start: int, accumulated: int
) -> None:
    model, training, states = trained(kind, accumulated)
    assert len(states) == training.num_steps == 80
    again, _ = replayed(training, kind, start)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_saved_it_is_still_so(tmp_path: Path) -> None:
    model, training, _ = trained("adamw")
    loaded = engram.load(training.save(tmp_path))
    again, _ = replayed(loaded, "adamw", 48)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_random_numbers_are_kept_only_where_others_have_drawn() -> None:
    _, training, _ = trained("sgd")
    assert training.order is not None
    kept = [part.step for part in training.order.parts if part.random_state is not None]
    epochs, checkpoints = {1, 17, 33, 49, 65}, {step + 1 for step in range(8, 80, 8)}
    assert set(kept) == epochs | checkpoints


def test_what_was_not_told_is_asked_for() -> None:
    model = net()
    optimizer = KINDS["sgd"](model.parameters())
    with pytest.raises(ArgumentError, match=r"the model, and no scaler.*got no model"):
        engram.record(optimizer, replay=True)
    training = engram.record(optimizer, model, replay=True)
    backward(model, torch.arange(6))
    optimizer.step()
    assert training.order is not None
    with pytest.raises(TrainingError, match=r"examples of step 1.*call training\.note\(indices\)"):
        training.order.of_step(1)
    plain = KINDS["sgd"](model.parameters())
    other = engram.record(plain, model)
    other.note([0])  # nothing is kept
    backward(model, torch.arange(6))
    plain.step()
    with pytest.raises(TrainingError, match="record with replay=True"):
        restore(plain, other.snapshots()[-1])
