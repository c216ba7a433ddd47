"""The rows of the paper's table, and every switch of torch's optimizers, by hand in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError
from streamed import NUM_DATA, data

DECAY, STEPS, BETA = 0.05, 5, 0.999
Optimizers = Callable[..., torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def trained(make: Optimizers, coupled: bool, **settings: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """The model, its optimizer and the flat squares that it averages, [steps, ...] by name."""
    model = network()
    optimizer = make(model.parameters(), **settings)
    sign = -1.0 if settings.get("maximize") else 1.0
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sign * nn.functional.cross_entropy(model(data()[0]), data()[1])).backward()
        for name, p in model.named_parameters():
            decayed = sign * p.grad + (settings.get("weight_decay", 0.0) if coupled else 0) * p
            seen[name].append(decayed.detach().clone())
        optimizer.step()
    return model, optimizer, {name: torch.stack(gs) ** 2 for name, gs in seen.items()}


def averages(squares: Tensor, beta: float) -> Tensor:
    """The running average after every step, from zero, uncorrected."""
    steps = torch.arange(1, len(squares) + 1, dtype=squares.dtype)
    powers = (1 - beta) * beta ** (steps[:, None] - steps[None, :])
    return torch.einsum("ts,s...->t...", powers.tril(), squares)


def precision(optimizer: torch.optim.Optimizer, model: nn.Module, **settings: Any) -> Any:
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA, **settings)
    return posterior.multiply({n: torch.ones_like(p) for n, p in model.named_parameters()})


SWITCHES: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"maximize": True},
    {"maximize": True, "foreach": True},
    {"amsgrad": True},
    {"amsgrad": True, "fused": True},
    {"amsgrad": True, "maximize": True},
    {"lr": torch.tensor(1e-3), "foreach": False},
    {"differentiable": False, "capturable": False},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_in_both_readings_under_every_switch(kind: Any, switches: dict[str, Any]) -> None:
    given = {"betas": (0.9, BETA), "weight_decay": DECAY, **switches}
    model, optimizer, squares = trained(kind, kind is torch.optim.Adam, **given)
    corrected = precision(optimizer, model)
    as_in_paper = precision(optimizer, model, second_moment="paper")
    for name, square in squares.items():
        s = averages(square, BETA)
        s = s.amax(0) if switches.get("amsgrad") else s[-1]
        delta = NUM_DATA * DECAY
        torch.testing.assert_close(as_in_paper[name], NUM_DATA * s.sqrt() + delta)
        s_hat = s / (1 - BETA**STEPS)
        torch.testing.assert_close(corrected[name], NUM_DATA * s_hat.sqrt() + delta)


def test_the_two_readings_of_adam_are_fourteen_times_apart_at_step_five() -> None:
    model, optimizer, _ = trained(torch.optim.Adam, True, betas=(0.9, BETA))
    found = precision(optimizer, model, prior_precision=1e-12)["0.weight"]
    as_in_paper = precision(optimizer, model, second_moment="paper")["0.weight"]
    ratio = (1 - BETA**STEPS) ** -0.5
    assert 14 < ratio < 15
    torch.testing.assert_close(found / as_in_paper, torch.full_like(found, ratio))


@pytest.mark.parametrize("squares", ["batch", "paper"])
@pytest.mark.parametrize(
    "switches", [{}, {"foreach": True}, {"momentum": 0.9}, {"maximize": True}], ids=str
)
def test_rmsprop_is_the_same_in_both_readings(switches: dict[str, Any], squares: str) -> None:
    given = {"alpha": 0.9, "weight_decay": DECAY, **switches}
    model, optimizer, kept = trained(torch.optim.RMSprop, True, **given)
    found = precision(optimizer, model, second_moment=squares)
    for name, square in kept.items():
        expected = NUM_DATA * averages(square, 0.9)[-1].sqrt() + NUM_DATA * DECAY
        torch.testing.assert_close(found[name], expected)


def test_the_papers_reading_needs_no_prior() -> None:
    model, optimizer, squares = trained(torch.optim.Adam, True, betas=(0.9, BETA))
    with pytest.raises(ArgumentError, match="pass prior_precision"):
        precision(optimizer, model)
    found = precision(optimizer, model, second_moment="paper")
    expected = NUM_DATA * averages(squares["2.weight"], BETA)[-1].sqrt()
    torch.testing.assert_close(found["2.weight"], expected)
    adagrad = torch.optim.Adagrad(model.parameters(), weight_decay=DECAY)
    with pytest.raises(ArgumentError, match=r"Adagrad with .paper."):
        precision(adagrad, model, second_moment="paper")


@pytest.mark.parametrize(
    "switches",
    [{}, {"momentum": 0.9}, {"nesterov": True, "momentum": 0.9}, {"maximize": True}],
    ids=str,
)
def test_sgd_is_the_gradient_with_and_without_weight_decay(switches: dict[str, Any]) -> None:
    """V e with V = J J', whatever delta is."""
    model, optimizer, _ = trained(torch.optim.SGD, True, lr=0.1, **switches)
    x, y = data()
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert posterior.prior_precision == 0.0
    result = engram.sensitivities(model, (x, y), posterior, estimator="linear", progress=False)
    outputs = model(x)
    residual = (outputs.softmax(1) - nn.functional.one_hot(y, 3)).detach()
    for i in (0, 7):
        rows = [
            torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in outputs[i]
        ]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        torch.testing.assert_close(result.deviation[i], jacobian @ jacobian.mT @ residual[i])
    assert result.verdict.level in ("good", "caution", "unreliable")
    tracker = engram.Tracker(model, optimizer, (x, y))
    found = tracker.update()
    assert found is not None
    assert found.deviation.equal(result.deviation)


def test_the_tracker_passes_the_reading_on() -> None:
    model, optimizer, _ = trained(torch.optim.Adam, True, weight_decay=DECAY)
    tracker = engram.Tracker(model, optimizer, data(), second_moment="paper")
    expected = engram.posterior_of(optimizer, model, num_data=NUM_DATA, second_moment="paper")
    assert tracker.posterior().blocks[0].precision.equal(expected.blocks[0].precision)


@pytest.mark.parametrize("wrong", [2.5, True, "8", 0, -1, NUM_DATA + 1, float("nan")])
def test_a_batch_size_is_a_whole_number_of_examples(wrong: Any) -> None:
    model, optimizer, _ = trained(torch.optim.Adam, True, weight_decay=DECAY)
    with pytest.raises(ArgumentError, match="batch_size"):
        precision(optimizer, model, second_moment="example", training_batch_size=wrong)
    one = precision(optimizer, model, second_moment="example", training_batch_size=np.int64(8))
    other = precision(optimizer, model, second_moment="example", training_batch_size=8)
    assert one["0.bias"].equal(other["0.bias"])


@pytest.mark.parametrize("wrong", [True, 0, 2.5, "24", None])
def test_a_number_of_examples_is_a_whole_number(wrong: Any) -> None:
    model, optimizer, _ = trained(torch.optim.Adam, True, weight_decay=DECAY)
    with pytest.raises(ArgumentError, match="num_data"):
        engram.posterior_of(optimizer, model, num_data=wrong)
