"""The precision read off an optimizer, against its running averages computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ivon
import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, ModelMismatchError, PosteriorError

NUM_DATA, DECAY, STEPS = 20, 0.05, 3
Averaged = Callable[[list[Tensor]], Tensor]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (NUM_DATA,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """A few steps; returns the gradients that the optimizer saw, coupled weight decay included."""
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data()[0]), data()[1]).backward()
        seen.append({n: p.grad + DECAY * p.detach() for n, p in model.named_parameters()})
        optimizer.step()
    return seen


def running(beta: float) -> Averaged:
    def average(values: list[Tensor]) -> Tensor:
        total = torch.zeros_like(values[0])
        for value in values:
            total = beta * total + (1 - beta) * value
        return total

    return average


def corrected_squares(gradients: list[Tensor]) -> Tensor:
    return running(0.99)([g**2 for g in gradients]) / (1 - 0.99**STEPS)


def largest_squares(gradients: list[Tensor]) -> Tensor:
    so_far = [running(0.99)([g**2 for g in gradients[: t + 1]]) for t in range(STEPS)]
    return torch.stack(so_far).amax(0) / (1 - 0.99**STEPS)


def infinity_norm(gradients: list[Tensor]) -> Tensor:
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total = torch.maximum(0.99 * total, gradient.abs() + 1e-8)
    return total**2


CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Averaged]] = {
    "rmsprop": (
        lambda p: torch.optim.RMSprop(p, alpha=0.9, weight_decay=DECAY),
        lambda g: running(0.9)([x**2 for x in g]),
    ),
    "rmsprop centered": (
        lambda p: torch.optim.RMSprop(p, alpha=0.9, weight_decay=DECAY, centered=True),
        lambda g: running(0.9)([x**2 for x in g]) - running(0.9)(g) ** 2,
    ),
    "adam": (
        lambda p: torch.optim.Adam(p, betas=(0.9, 0.99), weight_decay=DECAY),
        corrected_squares,
    ),
    "adam foreach": (
        lambda p: torch.optim.Adam(p, betas=(0.9, 0.99), weight_decay=DECAY, foreach=True),
        corrected_squares,
    ),
    "adam fused": (
        lambda p: torch.optim.Adam(p, betas=(0.9, 0.99), weight_decay=DECAY, fused=True),
        corrected_squares,
    ),
    "adam amsgrad fused": (
        lambda p: torch.optim.Adam(
            p, betas=(0.9, 0.99), weight_decay=DECAY, amsgrad=True, fused=True
        ),
        largest_squares,
    ),
    "adam with the learning rate as a tensor": (
        lambda p: torch.optim.Adam(
            p, lr=torch.tensor(1e-3), betas=(0.9, 0.99), weight_decay=DECAY, foreach=False
        ),
        corrected_squares,
    ),
    "adam amsgrad": (
        lambda p: torch.optim.Adam(p, betas=(0.9, 0.99), weight_decay=DECAY, amsgrad=True),
        largest_squares,
    ),
    "radam": (
        lambda p: torch.optim.RAdam(p, betas=(0.9, 0.99), weight_decay=DECAY),
        corrected_squares,
    ),
    "nadam": (
        lambda p: torch.optim.NAdam(p, betas=(0.9, 0.99), weight_decay=DECAY),
        corrected_squares,
    ),
    "adamax": (
        lambda p: torch.optim.Adamax(p, betas=(0.9, 0.99), weight_decay=DECAY),
        infinity_norm,
    ),
    "adamax foreach": (
        lambda p: torch.optim.Adamax(p, betas=(0.9, 0.99), weight_decay=DECAY, foreach=True),
        infinity_norm,
    ),
    "rmsprop with momentum": (
        lambda p: torch.optim.RMSprop(p, alpha=0.9, weight_decay=DECAY, momentum=0.9),
        lambda g: running(0.9)([x**2 for x in g]),
    ),
    "adagrad fused": (
        lambda p: torch.optim.Adagrad(p, weight_decay=DECAY, fused=True),
        lambda g: torch.stack([x**2 for x in g]).mean(0),
    ),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, weight_decay=DECAY),
        lambda g: torch.stack([x**2 for x in g]).mean(0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_precision_is_n_times_the_root_of_the_running_square(name: str) -> None:
    make, square = CASES[name]
    model = network()
    optimizer = make(model.parameters())
    gradients = train(model, optimizer)
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert posterior.prior_precision == pytest.approx(NUM_DATA * DECAY)
    ones = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for parameter, diagonal in posterior.multiply(ones).items():
        expected = NUM_DATA * square([g[parameter] for g in gradients]).clamp(min=0).sqrt()
        torch.testing.assert_close(diagonal, expected + NUM_DATA * DECAY, rtol=1e-9, atol=1e-9)


def test_adamw_does_not_see_its_decay() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=DECAY)
    plain = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data()[0]), data()[1]).backward()
        plain.append(model[0].weight.grad.clone())
        optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    got = posterior.multiply({"0.weight": torch.ones_like(model[0].weight)})["0.weight"]
    expected = NUM_DATA * corrected_squares(plain).sqrt() + NUM_DATA * DECAY
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"fused": True}],
    ids=str,
)
def test_sgd_is_the_gradient_itself(settings: dict[str, Any]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    train(model, optimizer)
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA, prior_precision=1.0)
    vector = {"0.bias": torch.arange(5.0).double()}
    assert posterior.solve(vector)["0.bias"].equal(vector["0.bias"])


def test_ivon_in_two_groups() -> None:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = ivon.IVON(groups, lr=0.1, ess=NUM_DATA, hess_init=0.1, weight_decay=DECAY)
    for _ in range(STEPS):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data()[0]), data()[1]).backward()
        optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    got = posterior.multiply({"2.bias": torch.ones(3).double()})["2.bias"]
    expected = NUM_DATA * (optimizer.param_groups[1]["hess"][-3:] + DECAY)
    torch.testing.assert_close(got, expected)
    result = engram.sensitivities(model, data(), posterior, progress=False)
    assert result.loo_nll > result.train_nll


def test_frozen_and_unstepped_parameters_count_as_fixed() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=DECAY)
    model[2](torch.ones(2, 5).double()).sum().backward()
    optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert posterior.names == ("2.weight", "2.bias")
    assert posterior.settings["not_stepped"] == ["0.weight"]
    assert engram.sensitivities(model, data(), posterior, progress=False).num_data == NUM_DATA


class Unknown(torch.optim.Optimizer):
    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"weight_decay": DECAY})


def test_bad_input_says_what_to_do() -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters(), weight_decay=DECAY)
    with pytest.raises(PosteriorError, match=r"taken a step.*after training"):
        engram.posterior_of(adam, model, num_data=NUM_DATA)
    with pytest.raises(ModelMismatchError, match="trains none of them"):
        engram.posterior_of(adam, network(), num_data=NUM_DATA)
    with pytest.raises(PosteriorError, match=r"Adam.*got Unknown.*register"):
        engram.posterior_of(Unknown(model.parameters()), model, num_data=NUM_DATA)
    without = torch.optim.Adam(model.parameters())
    with pytest.raises(ArgumentError, match="pass prior_precision"):
        engram.posterior_of(without, model, num_data=NUM_DATA)
    with pytest.raises(ArgumentError, match="num_data"):
        engram.posterior_of(adam, model, num_data=0)


def test_a_summed_loss_gives_the_same_posterior() -> None:
    found = []
    for reduction in ("mean", "sum"):
        model = network()
        factor = NUM_DATA if reduction == "sum" else 1
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0, weight_decay=factor * DECAY)
        for _ in range(STEPS):
            optimizer.zero_grad()
            outputs = model(data()[0])
            nn.functional.cross_entropy(outputs, data()[1], reduction=reduction).backward()
            optimizer.step()
        found.append(
            engram.posterior_of(
                optimizer,
                model,
                num_data=NUM_DATA,
                reduction=reduction,
                training_batch_size=NUM_DATA,
            )
        )
    assert found[0].prior_precision == pytest.approx(found[1].prior_precision)
    assert found[0].log_det() == pytest.approx(found[1].log_det())
    with pytest.raises(ArgumentError, match="batch_size"):
        engram.posterior_of(optimizer, model, num_data=NUM_DATA, reduction="sum")


@pytest.mark.parametrize(
    ("make", "floor"),
    [
        (torch.optim.Adam, 1e-8),
        (torch.optim.RMSprop, 1e-8),
        (torch.optim.Adagrad, 1e-10 / STEPS**0.5),
    ],
)
def test_an_entry_without_gradients_or_decay_has_the_precision_of_eps(
    make: Callable[..., torch.optim.Optimizer], floor: float
) -> None:
    model = nn.Linear(4, 3).double()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.1}]
    optimizer = make(groups, lr=0.01)
    x, y = data()
    x[:, 0] = 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    ones = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    found = posterior.multiply(ones)["weight"][:, 0]
    torch.testing.assert_close(found, torch.full_like(found, NUM_DATA * floor))
    assert torch.isfinite(engram.sensitivities(model, (x, y), posterior).score).all()
