"""Optimizers of other packages: their training time and precision against their own real steps."""

from __future__ import annotations

import math
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import schedulefree
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

import engram
from engram.errors import PosteriorError, TrainingError

NUM_DATA, DECAY = 60, 0.01


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(NUM_DATA) % 3
    x = torch.randn(NUM_DATA, 5, generator=generator, dtype=torch.float64)
    return x + 1.5 * torch.eye(3, 5, dtype=torch.float64)[y], y


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    first, last = nn.Linear(5, 4, bias=bias), nn.Linear(4, 3, bias=bias)
    return nn.Sequential(first, nn.Tanh(), last).double()


def backward(model: nn.Module, step: int) -> None:
    x, y = data()
    rows = torch.randperm(NUM_DATA, generator=torch.Generator().manual_seed(step))[:20]
    model.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()


def trained(model: nn.Module, optimizer: Optimizer, steps: int) -> engram.Training:
    training = engram.record(optimizer, model)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
    return training


def recorded_steps(
    model: nn.Module, optimizer: Optimizer, steps: int
) -> tuple[dict[str, Tensor], engram.Training]:
    """The sum over the steps of what each moved an entry by, over its gradient."""
    training = engram.record(optimizer, model)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(steps):
        backward(model, step)
        before = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            weights, gradient = before[name]
            total[name] += (weights - p.detach()) / gradient
    return total, training


FACTORED: dict[str, Any] = {
    "torch": lambda p: Adafactor(p, lr=0.01),
    "transformers": lambda p: transformers.Adafactor(p),
    "transformers_plain": lambda p: transformers.Adafactor(
        p, lr=0.01, scale_parameter=False, relative_step=False
    ),
}


@pytest.mark.parametrize("kind", FACTORED)
def test_adafactor_has_the_time_of_its_steps(kind: str) -> None:
    """Without momentum a step is the gradient over the root, entry by entry."""
    model = network()
    expected, training = recorded_steps(model, FACTORED[kind](model.parameters()), 12)
    time = training.of(model).time
    tolerance = 0.01 if kind == "torch" else 1e-6  # torch's size is that after the step
    for name, value in expected.items():
        torch.testing.assert_close(time[name], value, rtol=tolerance, atol=0)


def test_adafactor_is_read_by_its_rows_and_columns() -> None:
    model = network()
    optimizer = Adafactor(model.parameters(), lr=0.01, weight_decay=DECAY)
    gradients = []
    for step in range(3):
        backward(model, step)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    shares = [step**-0.8 for step in (1, 2, 3)]

    def average(values: list[Tensor]) -> Tensor:
        total = torch.zeros_like(values[0])
        for value, share in zip(values, shares, strict=True):
            total = (1 - share) * total + share * value
        return total

    rows = average([g["0.weight"].square().mean(1) for g in gradients])
    columns = average([g["0.weight"].square().mean(0) for g in gradients])
    square = rows[:, None] * columns / rows.mean()
    found = posterior.block_of["0.weight"].precision
    torch.testing.assert_close(found, NUM_DATA * (square.sqrt() + DECAY))
    vector = average([g["0.bias"].square() for g in gradients])
    found = posterior.block_of["0.bias"].precision
    torch.testing.assert_close(found, NUM_DATA * (vector.sqrt() + DECAY))


def test_soap_is_a_kronecker_posterior_whose_step_is_its_own() -> None:
    """S^-1 of the averaged gradient, without prior, is the direction that SOAP takes."""
    model = network()
    settings = {"lr": 0.01, "weight_decay": 0.0, "precondition_frequency": 100}
    optimizer = pytorch_optimizer.SOAP(model.parameters(), **settings)
    for step in range(8):
        backward(model, step)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=1, prior_precision=1e-12)
    corrected = 1 - 0.95**7
    moment = {n: optimizer.state[p]["exp_avg"] / corrected for n, p in model.named_parameters()}
    for name, step_ in posterior.solve(moment).items():
        moved = (before[name] - dict(model.named_parameters())[name].detach()) / 0.01
        torch.testing.assert_close(moved, step_, rtol=1e-5, atol=1e-5)
    assert type(posterior.block_of["0.weight"]).__name__ == "KroneckerBlock"
    result = engram.sensitivities(model, data(), posterior, progress=False)
    assert result.loo_loss.isfinite().all()


def test_shampoo_is_a_kronecker_posterior_whose_step_is_its_own() -> None:
    model = network()
    optimizer = pytorch_optimizer.Shampoo(model.parameters(), lr=0.01, matrix_eps=1e-4)
    for step in range(6):
        backward(model, step)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=1, prior_precision=1e-12)
    for name, step_ in posterior.solve(gradients).items():
        moved = (before[name] - dict(model.named_parameters())[name].detach()) / 0.01
        torch.testing.assert_close(moved, step_ / math.sqrt(6), rtol=1e-4, atol=1e-7)


def test_the_time_of_soap_and_shampoo_is_that_of_their_diagonal() -> None:
    makers: list[Any] = [
        lambda p: pytorch_optimizer.SOAP(p, lr=0.01, weight_decay=0.0),
        lambda p: pytorch_optimizer.Shampoo(p, lr=0.01),
    ]
    for make in makers:
        model = network()
        optimizer = make(model.parameters())
        training = engram.record(optimizer, model)
        expected = torch.zeros(4, 5, dtype=torch.float64)
        for step in range(10):
            backward(model, step)
            optimizer.step()
            state = optimizer.state[model[0].weight]
            if "Q" in state:
                if not step:
                    continue  # makes the basis and moves nothing
                root = (state["exp_avg_sq"] / (1 - 0.95**step)).sqrt() + 1e-8
                turn = torch.kron(*state["Q"])
                inverse = turn @ torch.diag(1 / root.flatten()) @ turn.mT
            else:
                values, vectors = zip(
                    *(torch.linalg.eigh(state[f"pre_cond_{k}"]) for k in (0, 1)), strict=True
                )
                parts = [
                    q @ torch.diag(v**-0.25) @ q.mT for v, q in zip(values, vectors, strict=True)
                ]
                inverse = torch.kron(*parts)
            expected += 0.01 * inverse.diagonal().reshape(4, 5)
        torch.testing.assert_close(training.of(model).time["0.weight"], expected, rtol=1e-5, atol=0)


def test_shampoo_with_momentum_is_refused() -> None:
    model = network()
    with pytest.raises(TrainingError, match="Shampoo without momentum"):
        trained(model, pytorch_optimizer.Shampoo(model.parameters(), momentum=0.9), 1)


def noisy(model: nn.Module, optimizer: Optimizer, nudge: Tensor, steps: int) -> engram.Training:
    """Gradients that are noise, and the nudge."""
    training = engram.record(optimizer, model)
    generator = torch.Generator().manual_seed(0)
    (weight,) = model.parameters()
    for _ in range(steps):
        draw = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.grad = 0.3 * draw + nudge
        optimizer.step()
    return training


NORMALISED: dict[str, Any] = {
    "lion": lambda p: lion_pytorch.Lion(p, lr=0.01),
    "muon": lambda p: Muon(p, lr=0.01, weight_decay=0.0),
    "muon_plain": lambda p: Muon(p, lr=0.01, weight_decay=0.0, nesterov=False, momentum=0.8),
}


@pytest.mark.parametrize("kind", NORMALISED)
def test_a_nudge_moves_normalised_steps_by_the_time(kind: str) -> None:
    """In the mean over many entries: each alone is the noise of its signs.

    Muon's P says what c is divided by; pure noise moves by a tenth less.
    """
    shape, steps, size = (48, 200), 200, 0.006

    def weights() -> nn.Linear:
        model = nn.Linear(200, 48, bias=False).double()
        nn.init.zeros_(model.weight)
        return model

    nudge = size * torch.randn(shape, generator=torch.Generator().manual_seed(5)).double().sign()
    still, moved = weights(), weights()
    noisy(still, NORMALISED[kind](still.parameters()), torch.zeros_like(nudge), steps)
    training = noisy(moved, NORMALISED[kind](moved.parameters()), nudge, steps)
    response = ((still.weight - moved.weight).detach() * nudge).sum() / nudge.square().sum()
    time = training.of(moved).time["weight"].mean()
    assert float(time) == pytest.approx(float(response), rel=0.1 if kind == "lion" else 0.15)


def test_muon_is_a_kronecker_posterior_whose_step_is_its_own() -> None:
    for shape in ((6, 9), (9, 6)):
        torch.manual_seed(0)
        model = nn.Linear(shape[1], shape[0], bias=False)
        optimizer = Muon(model.parameters(), lr=0.1, weight_decay=0.0, nesterov=False)
        model.weight.grad = torch.randn(shape)
        before = model.weight.detach().clone()
        optimizer.step()
        posterior = engram.posterior_of(optimizer, model, num_data=1, prior_precision=1e-9)
        step = posterior.solve({"weight": optimizer.state[model.weight]["momentum_buffer"]})
        moved = (before - model.weight.detach()) / 0.1
        torch.testing.assert_close(moved, step["weight"], rtol=0.05, atol=0.02)  # it has 8 bits


def test_lion_is_read_as_the_noise_of_its_momentum() -> None:
    model = nn.Linear(200, 100, bias=False).double()
    optimizer = lion_pytorch.Lion(model.parameters(), lr=1e-3, weight_decay=DECAY)
    noisy(model, optimizer, torch.zeros_like(model.weight), 600)
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    share = 0.01 / 1.99
    deviation = 0.3 * math.sqrt(0.01 + 0.81 * share)
    expected = NUM_DATA * (deviation * math.sqrt(math.pi / 2) + DECAY)
    found = posterior.block_of["weight"].precision
    assert float(found.mean()) == pytest.approx(expected, rel=0.02)


FREE: dict[str, Any] = {
    "adamw": lambda p: schedulefree.AdamWScheduleFree(
        p, lr=0.02, warmup_steps=4, weight_decay=DECAY
    ),
    "radam": lambda p: schedulefree.RAdamScheduleFree(p, lr=0.02, weight_decay=DECAY),
    "sgd": lambda p: schedulefree.SGDScheduleFree(p, lr=0.5, warmup_steps=4, weight_decay=DECAY),
}


@pytest.mark.parametrize("kind", FREE)
def test_schedule_free_has_the_time_and_decay_of_its_average(kind: str) -> None:
    """Against x and z in a loop by hand, which moves by ones in place of gradients."""
    model = network()
    optimizer = FREE[kind](model.parameters())
    optimizer.train()
    training = engram.record(optimizer, model)
    weight, beta = model[0].weight, 0.999
    z = x = torch.zeros_like(weight)
    shrunk_z = shrunk_x = 0.0
    for step in range(30):
        backward(model, step)
        optimizer.step()
        group = optimizer.param_groups[0]
        rate = group["scheduled_lr"]
        root = torch.ones_like(weight)
        if kind != "sgd":
            square = optimizer.state[weight]["exp_avg_sq"] / (1 - beta ** (step + 1))
            root = square.sqrt() + 1e-8
        z = z + rate / root
        share = group["lr_max"] ** 2 / group["weight_sum"] if group["weight_sum"] else 0.0
        x = (1 - share) * x + share * z
        shrunk_z += rate * DECAY
        shrunk_x = (1 - share) * shrunk_x + share * shrunk_z
    named = training.of(model)
    assert training.sees_clipping
    torch.testing.assert_close(named.time["0.weight"].expand_as(x), x, rtol=1e-6, atol=0)
    decay = named.decay["0.weight"]
    expected = DECAY * x if kind == "sgd" else torch.full_like(x, shrunk_x)
    torch.testing.assert_close(decay.expand_as(x), expected, rtol=1e-6, atol=0)


def test_schedule_free_is_read_at_the_average() -> None:
    model = network()
    optimizer = FREE["adamw"](model.parameters())
    optimizer.train()
    trained(model, optimizer, 5)
    with pytest.raises(PosteriorError, match=r"eval mode.*optimizer\.eval\(\)"):
        engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    optimizer.eval()
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    square = optimizer.state[model[2].weight]["exp_avg_sq"] / (1 - 0.999**5)
    expected = NUM_DATA * (square.sqrt() + DECAY)
    torch.testing.assert_close(posterior.block_of["2.weight"].precision, expected)


def test_adam_of_8_bits_is_adam() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    plain, packed = nn.Linear(300, 40), nn.Linear(300, 40)
    packed.load_state_dict(plain.state_dict())
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=DECAY),
        bitsandbytes.optim.AdamW8bit(packed.parameters(), lr=1e-3, weight_decay=DECAY),
    )
    trainings = []
    inputs = torch.randn(8, 16, 300)
    for model, optimizer in zip((plain, packed), optimizers, strict=True):
        trainings.append(engram.record(optimizer, model))
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    times = [t.of(m).time["weight"] for t, m in zip(trainings, (plain, packed), strict=True)]
    assert float((times[1] / times[0]).median()) == pytest.approx(1, rel=0.02)
    both = zip(optimizers, (plain, packed), strict=True)
    blocks = [engram.posterior_of(o, m, num_data=50).block_of["weight"] for o, m in both]
    torch.testing.assert_close(blocks[1].precision, blocks[0].precision, rtol=0.15, atol=0.02)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return nn.functional.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("kind", ["lion", "muon", "adafactor", "schedule_free", "soap"])
def test_a_recorded_training_agrees_with_true_retraining(kind: str) -> None:
    """LOO losses of one record against trainings without each of some examples."""
    makers: dict[str, Any] = {
        "lion": lambda p: lion_pytorch.Lion(p, lr=0.01, weight_decay=0.1),
        "muon": lambda p: Muon(p, lr=0.02),
        "adafactor": lambda p: Adafactor(p, lr=0.1),
        "schedule_free": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.05),
        "soap": lambda p: pytorch_optimizer.SOAP(p, lr=0.02),
    }
    x, y = (part.float() if part.is_floating_point() else part for part in data())
    y = torch.where(torch.arange(NUM_DATA) % 9 == 4, (y + 1) % 3, y)  # some wrong labels
    batches = [
        torch.randperm(NUM_DATA, generator=torch.Generator().manual_seed(s)).split(10)
        for s in range(12)
    ]

    def fit(without: int | None) -> tuple[nn.Module, engram.Training | None]:
        model = network(bias=False).float()
        optimizer = makers[kind](model.parameters())
        training = engram.record(optimizer, model) if without is None else None
        if kind == "schedule_free":
            optimizer.train()
        for rows in (rows for epoch in batches for rows in epoch):
            kept = rows[rows != (-1 if without is None else without)]
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(x[kept]), y[kept], reduction="sum")
            (losses / len(rows)).backward()
            optimizer.step()
        if kind == "schedule_free":
            optimizer.eval()
        return model, training

    model, training = fit(None)
    posterior = engram.laplace(
        model, (x, y), training=training, structure="kronecker", progress=False
    )
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    chosen = list(range(1, NUM_DATA, 3))
    truth = torch.tensor([_loss(fit(i)[0], x[i : i + 1], y[i : i + 1]) for i in chosen])
    loss, estimate = result.loss[chosen], result.loo_loss[chosen]
    increase = (estimate - loss).mean() / (truth - loss).mean()
    correlation = torch.corrcoef(torch.stack([estimate, truth]))[0, 1]
    print(kind, float(increase), float(correlation), float((truth - loss).mean()))
    assert correlation > 0.95
    assert 1 / 3 < increase < 3
