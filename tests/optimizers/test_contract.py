"""What torch users expect of an optimizer: checkpoints, schedules, and no trace of a failure."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import engram
from engram.errors import ArgumentError, ModelMismatchError
from engram.optimizers import (
    VON,
    DiagonalOnlineNewton,
    DiagonalVON,
    GaussNewton,
    Hutchinson,
    Newton,
    OnlineNewton,
    Reparameterised,
)
from worked_problems import NUM_DATA, classes, network

GGN, SAMPLED = GaussNewton("categorical"), GaussNewton("categorical", probes=2)
SETTINGS = {"num_data": NUM_DATA, "prior_precision": 2.0}
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "newton": lambda p: Newton(p, **SETTINGS, lr=0.1, curvature=GGN),
    "online newton": lambda p: OnlineNewton(p, **SETTINGS, lr=0.1, curvature=GGN),
    "diagonal hutchinson": lambda p: DiagonalOnlineNewton(
        p, **SETTINGS, precision_lr=0.01, curvature=Hutchinson(2)
    ),
    "diagonal ggn": lambda p: DiagonalOnlineNewton(p, **SETTINGS, curvature=SAMPLED),
    "von": lambda p: VON(p, **SETTINGS, samples=2, curvature=GGN),
    "diagonal von": lambda p: DiagonalVON(p, **SETTINGS, samples=2, curvature=SAMPLED),
    "diagonal von, reparameterised": lambda p: DiagonalVON(
        p, **SETTINGS, lr=0.01, precision_lr=1e-3, samples=2, curvature=Reparameterised()
    ),
}
SAMPLING = [name for name in MAKERS if "von" in name]


def closure(model: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    x, y = classes()
    if isinstance(optimizer.curvature, GaussNewton):
        return lambda: (model(x), y)
    return lambda: nn.functional.cross_entropy(model(x), y)


def start(name: str) -> tuple[nn.Module, Optimizer]:
    model = network()
    return model, MAKERS[name](model.parameters())


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_goes_on_bit_by_bit(name: str) -> None:
    model, optimizer = start(name)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        optimizer.step(closure(model, optimizer))
        schedule.step()
    file = io.BytesIO()
    states = (model.state_dict(), optimizer.state_dict(), schedule.state_dict())
    torch.save(states, file)
    for _ in range(3):
        optimizer.step(closure(model, optimizer))
        schedule.step()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = start(name)
    again = torch.optim.lr_scheduler.CosineAnnealingLR(resumed, 10)
    for target, state in zip((other, resumed, again), saved, strict=True):
        target.load_state_dict(state)
    torch.manual_seed(99)  # the caller's random state plays no part
    for _ in range(3):
        resumed.step(closure(other, resumed))
        again.step()
    assert all(a.equal(b) for a, b in zip(weights(model), weights(other), strict=True))
    posteriors = [
        engram.posterior_of(o, m, num_data=NUM_DATA)
        for o, m in ((optimizer, model), (resumed, other))
    ]
    assert posteriors[0].log_det() == posteriors[1].log_det()


@pytest.mark.parametrize("name", MAKERS)
def test_the_callers_random_state_and_gradients_are_untouched(name: str) -> None:
    model, optimizer = start(name)
    before = torch.get_rng_state()
    loss = optimizer.step(closure(model, optimizer))
    assert loss.shape == ()
    assert not loss.requires_grad
    assert torch.get_rng_state().equal(before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", MAKERS)
def test_a_failing_closure_leaves_no_trace(name: str) -> None:
    model, optimizer = start(name)
    optimizer.step(closure(model, optimizer))
    clean_model = copy.deepcopy(model)
    clean = MAKERS[name](clean_model.parameters())
    clean.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before, calls = weights(model), []

    def failing() -> object:
        calls.append(weights(model))
        if len(calls) == (2 if name in SAMPLING else 1):
            raise KeyboardInterrupt
        return closure(model, optimizer)()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    if name in SAMPLING:
        assert not calls[0][0].equal(before[0])  # it did run at a draw
    assert all(a.equal(b) for a, b in zip(weights(model), before, strict=True))
    optimizer.step(closure(model, optimizer))
    clean.step(closure(clean_model, clean))
    assert all(a.equal(b) for a, b in zip(weights(model), weights(clean_model), strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_is_independent(name: str) -> None:
    model, optimizer = start(name)
    optimizer.step(closure(model, optimizer))
    other_model, other = copy.deepcopy((model, optimizer))
    other.step(closure(other_model, other))
    optimizer.step(closure(model, optimizer))
    assert all(a.equal(b) for a, b in zip(weights(model), weights(other_model), strict=True))


def test_states_of_others_are_refused() -> None:
    model, optimizer = start("von")
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ArgumentError, match="state of VON"):
        optimizer.load_state_dict(adam.state_dict())
    optimizer.step(closure(model, optimizer))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ModelMismatchError, match="new optimizer after freezing"):
        optimizer.step(closure(model, optimizer))


def test_the_tracker_takes_them() -> None:
    x, y = classes()
    model, optimizer = start("diagonal von")
    tracker = engram.Tracker(model, optimizer, (x, y))
    for _ in range(3):
        optimizer.step(closure(model, optimizer))
        assert tracker.update() is not None
    assert len(tracker.history) == 3


def test_a_state_of_the_other_structure_is_refused() -> None:
    model = nn.Linear(2, 1)
    full = VON(model.parameters(), num_data=4, prior_precision=1.0)
    diagonal = DiagonalVON(model.parameters(), num_data=4, prior_precision=1.0)
    for optimizer in (full, diagonal):
        optimizer.step(lambda: model(torch.ones(4, 2)).square().mean())
    for optimizer, other in ((full, diagonal), (diagonal, full)):
        before = optimizer.state_dict()
        with pytest.raises(ArgumentError, match="same class"):
            optimizer.load_state_dict(other.state_dict())
        optimizer.load_state_dict(before)
