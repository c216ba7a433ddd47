"""Training time against what it says: how far a nudge of all gradients moves the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ivon
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

import engram

NUDGE = 1e-6
STEPS = 12
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd_momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_dampening": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd_nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_foreach": (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "adam": (Adam, {"lr": 0.01}),
    "adam_amsgrad": (Adam, {"lr": 0.01, "amsgrad": True}),
    "adam_fused": (Adam, {"lr": 0.01, "fused": True}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.0}),
    "nadam": (NAdam, {"lr": 0.01}),
    "nadam_foreach": (NAdam, {"lr": 0.01, "foreach": True}),
    "radam": (RAdam, {"lr": 0.01}),
    "radam_forgetful": (RAdam, {"lr": 0.01, "betas": (0.9, 0.95)}),
    "adamax": (Adamax, {"lr": 0.01}),
    "rmsprop": (RMSprop, {"lr": 0.01}),
    "rmsprop_momentum": (RMSprop, {"lr": 0.01, "momentum": 0.9}),
    "rmsprop_centered": (RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "adagrad": (Adagrad, {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.7}),
}


class Weights(nn.Module):
    """Parameters whose gradients are set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        self.two = nn.Parameter(torch.zeros(4, dtype=torch.float64))


def filled(optimizer: Optimizer, model: nn.Module) -> None:
    """Averages of squares of some size, so that a nudge of gradients of 0 changes nothing there."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            if name in ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"):
                value.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.5)


def trained(make: Callable[[Any], Optimizer], nudge: float) -> tuple[Weights, engram.Training]:
    """A schedule of learning rates, and gradients that are the nudge in every step."""
    model = Weights()
    optimizer = make(model.parameters())
    for parameter in model.parameters():  # makes the state, without a move
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.zero_()
        if isinstance(optimizer, SGD):
            optimizer.state[parameter].pop("momentum_buffer", None)
        if "mu_product" in optimizer.state[parameter]:
            optimizer.state[parameter]["mu_product"].fill_(1.0)
    filled(optimizer, model)
    schedule = CosineAnnealingLR(optimizer, 2 * STEPS)
    training = engram.record(optimizer, model)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, nudge)
        optimizer.step()
        schedule.step()
    return model, training


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nudge_of_all_gradients_moves_the_weights_by_the_time(name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    still, _ = trained(lambda p: kind(p, **settings), 0.0)
    moved, training = trained(lambda p: kind(p, **settings), NUDGE)
    time = training.of(moved).time
    for (key, before), after in zip(still.named_parameters(), moved.parameters(), strict=True):
        response = (before - after).detach() / NUDGE
        torch.testing.assert_close(time[key].expand_as(response), response, rtol=1e-6, atol=0)


CLOSED: dict[str, Callable[[Any], Optimizer]] = {
    "ivon": lambda p: ivon.IVON(p, lr=0.1, ess=100, weight_decay=1e-9, beta2=0.9),
    "ivon_plain": lambda p: ivon.IVON(
        p, lr=0.1, ess=100, weight_decay=1e-9, hess_init=0.3, debias=False, rescale_lr=False
    ),
    "diagonal_online_newton": lambda p: engram.optimizers.DiagonalOnlineNewton(p, **OWN),
    "diagonal_von": lambda p: engram.optimizers.DiagonalVON(p, **OWN),
    "online_newton": lambda p: engram.optimizers.OnlineNewton(p, **OWN),
    "von": lambda p: engram.optimizers.VON(p, **OWN),
}
OWN: dict[str, Any] = {"num_data": 10, "prior_precision": 1e-9, "lr": 0.2}


@pytest.mark.parametrize("name", CLOSED)
def test_the_same_for_optimizers_that_run_the_loss_themselves(name: str) -> None:
    """With a loss that is linear in the weights, a nudge is a slope."""

    def trained(slope: float) -> tuple[Weights, engram.Training]:
        torch.manual_seed(0)
        model = Weights()
        optimizer = CLOSED[name](model.parameters())
        training = engram.record(optimizer, model)

        def loss() -> Tensor:
            total = sum(p.sum() + 1e-12 * (p**2).sum() for p in model.parameters())
            return slope * torch.as_tensor(total)

        for _ in range(STEPS):
            if isinstance(optimizer, ivon.IVON):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    loss().backward()
                optimizer.step()
            else:
                optimizer.step(loss)  # type: ignore[arg-type]
        return model, training

    still, _ = trained(0.0)
    moved, training = trained(NUDGE)
    named = training.of(moved)
    for (key, before), after in zip(still.named_parameters(), moved.parameters(), strict=True):
        response = (before - after).detach() / NUDGE
        torch.testing.assert_close(named.time[key].expand_as(response), response, rtol=1e-4, atol=0)


def test_a_parameter_without_gradient_has_no_time() -> None:
    model = Weights()
    optimizer = SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer)
    model.one.grad = torch.ones_like(model.one)
    optimizer.step()
    assert training.of(model).time["two"].item() == 0
    assert not training.of(model).moved["two"]
    assert training.of(model).moved["one"]


def test_groups_have_their_own_learning_rates_also_those_added_later() -> None:
    model = Weights()
    optimizer = SGD([{"params": [model.one], "lr": 0.1}])
    training = engram.record(optimizer, model)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [model.two], "lr": 0.5})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    time = training.of(model).time
    assert time["one"].item() == pytest.approx(0.4)
    assert time["two"].item() == pytest.approx(1.0)


def test_roots_read_now_and_then_are_as_good_as_at_every_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    inputs, labels = torch.randn(256, 8), torch.randint(3, (256,))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    training = engram.record(optimizer, model)
    exact = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(1, 401):
        chosen = torch.randint(256, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            average = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999**step)
            exact[name] += 1e-2 / (average.sqrt() + 1e-8)
    time = training.of(model).time
    for name, value in exact.items():
        torch.testing.assert_close(time[name], value, rtol=0.02, atol=0)
        assert time[name].mean() == pytest.approx(value.mean().item(), rel=2e-3)


@pytest.mark.parametrize("kind", [Adam, AdamW, RMSprop, Adagrad])
def test_entries_that_no_gradient_has_reached_have_the_time_of_the_others(
    kind: type[Optimizer],
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=1e-2)
    training = engram.record(optimizer, model)
    for step in range(40):
        inputs = torch.randn(8, 4)
        inputs[:, 3] = 0  # never
        if step < 20:
            inputs[:, 2] = 0  # not in the first half
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    named = training.of(model)
    time = named.time["weight"]
    often, late, never = time[:, :2], time[:, 2], time[:, 3]
    assert late.max() < 10 * often.max()  # by its eps it would be 100,000 times as long
    torch.testing.assert_close(never, time[:, :3].mean().expand(2))
    first = named.segments(2)[0].time["weight"]
    assert first.min() > 0
    assert first.max() < 10 * first[:, :2].max()
