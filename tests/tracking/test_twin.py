"""A twin of the training, against closed forms and against a training of its own."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ivon import IVON
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from engram.errors import ArgumentError, DataError, EngineError, LikelihoodError, PosteriorError
from engram.likelihoods import resolve
from engram.optimizers import Newton
from engram.tracking.followed import Followed
from engram.tracking.twin import Twin
from streamed import BATCH, MODELS, NUM_DATA, batches, data

COUNT = 7


class SignDescent(optim.Optimizer):
    """A user's own, with something that is not in its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.sharpness = 3.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    move = torch.tanh(self.sharpness * parameter.grad)
                    parameter.sub_(group["lr"] * move)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "a user's own": lambda p: SignDescent(p, 0.01),
}


def net(name: str = "tanh") -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name][0]().double()


def followed_by(model: nn.Module, optimizer: optim.Optimizer, reduction: str = "mean") -> Followed:
    return Followed(model, optimizer, data(), resolve("categorical"), COUNT, reduction)


def without(model: nn.Module, batch: Tensor, left_out: Tensor) -> Tensor:
    """The loss of a batch with the examples left out, still over the size of the batch."""
    x, y = data()
    losses = functional.cross_entropy(model(x[batch]), y[batch], reduction="none")
    kept = torch.tensor([int(i) not in left_out.tolist() for i in batch])
    return losses[kept].sum() / len(batch)


def assert_same(twin: Twin, reference: nn.Module) -> None:
    found = twin.weights
    for name, weight in reference.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = [p.detach().clone() for p in model.parameters()]
    yield
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.equal(value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_a_training_without_the_examples(name: str) -> None:
    """Beside a plain loop over the other examples, with a schedule."""
    x, y = data()
    model = net()
    reference, alone = copy.deepcopy(model), copy.deepcopy(model)
    nets = (model, reference, alone)
    first, second, third = (OPTIMIZERS[name](m.parameters()) for m in nets)
    schedules = [StepLR(o, 2, gamma=0.7) for o in (first, second, third)]
    followed = followed_by(model, first)
    for batch in batches(3):
        for optimizer in (first, second, third):
            optimizer.zero_grad()
        with followed.step(batch, y[batch], 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        without(reference, batch, followed.indices).backward()
        functional.cross_entropy(alone(x[batch]), y[batch]).backward()
        for optimizer, schedule in zip((first, second, third), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert_same(followed.twin, reference)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.equal(other)  # the training did not notice, bit for bit
    losses = followed.twin.losses(followed.batches, followed.indices, followed.likelihood)
    own = functional.cross_entropy(
        reference(x[followed.indices]), y[followed.indices], reduction="none"
    )
    torch.testing.assert_close(losses, own.detach())


def test_linear_regression_by_gradient_descent_in_closed_form() -> None:
    """theta_T = (1 - (1 - lr A)^T) A^-1 b over the examples that are left."""
    rate, decay, steps = 0.1, 0.05, 60
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = optim.SGD(model.parameters(), lr=rate, weight_decay=decay)
    followed = Followed(model, optimizer, TensorDataset(x, y), resolve("gaussian"), 4, "mean")
    for _ in range(steps):
        optimizer.zero_grad()
        with followed.step(torch.arange(12), None, 1.0):
            (0.5 * (model(x) - y).square().mean()).backward()
        optimizer.step()
    kept = [i for i in range(12) if i not in followed.indices.tolist()]
    matrix = x[kept].mT @ x[kept] / 12 + decay * torch.eye(3, dtype=torch.float64)
    faded = torch.linalg.matrix_power(torch.eye(3, dtype=torch.float64) - rate * matrix, steps)
    limit = torch.linalg.solve(matrix, x[kept].mT @ y[kept] / 12)
    torch.testing.assert_close(followed.twin.weights["weight"].detach().mT, limit - faded @ limit)


@pytest.mark.parametrize("name", ["dropout", "bare parameter", "residual", "convolutions"])
def test_the_same_random_numbers_and_any_model(name: str) -> None:
    x, y = data()
    model = net(name)
    reference = copy.deepcopy(model)
    first, second = optim.SGD(model.parameters(), 0.1), optim.SGD(reference.parameters(), 0.1)
    followed = followed_by(model, first)
    left_out = followed.indices.tolist()
    for number, batch in enumerate(batches(2)):
        first.zero_grad()
        second.zero_grad()
        torch.manual_seed(number)
        with followed.step(batch, None, 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        after = torch.get_rng_state()
        torch.manual_seed(number)
        losses = functional.cross_entropy(reference(x[batch]), y[batch], reduction="none")
        assert torch.get_rng_state().equal(after)
        weights = torch.tensor([float(int(i) not in left_out) for i in batch])
        (losses * weights).mean().backward()
        first.step()
        second.step()
    assert_same(followed.twin, reference)


def test_accumulated_clipped_and_skipped_steps() -> None:
    """A gradient that is clipped by a factor is clipped by the same factor in the twin."""
    x, y = data()
    model = net()
    reference = copy.deepcopy(model)
    first, second = optim.SGD(model.parameters(), 0.3), optim.SGD(reference.parameters(), 0.3)
    followed = followed_by(model, first)
    parts = batches(4)
    for number in range(0, len(parts), 2):
        first.zero_grad()
        second.zero_grad()
        for batch in parts[number : number + 2]:
            with followed.step(batch, y[batch], 0.5):
                (0.5 * functional.cross_entropy(model(x[batch]), y[batch])).backward()
            (0.5 * without(reference, batch, followed.indices)).backward()
        if number == 4:  # a step that is not taken: its gradients are forgotten
            continue
        length = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.clamp(0.2 / length, max=1.0))
        first.step()
        second.step()
    found = followed.twin.weights
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
    followed = followed_by(model, first)
    for number, batch in enumerate(batches(3)):
        if number == 4:
            for owner, optimizer in ((model, first), (reference, second)):
                optimizer.add_param_group({"params": [owner[0].weight], "lr": 0.02})  # type: ignore[index]
        first.zero_grad()
        second.zero_grad()
        with followed.step(batch, y[batch], 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        without(reference, batch, followed.indices).backward()
        first.step()
        second.step()
    assert set(followed.twin.weights) == {"0.weight", "2.weight", "2.bias"}
    assert_same(followed.twin, reference)


def test_steps_with_a_closure_and_a_summed_loss() -> None:
    x, y = data()
    model = net()
    reference = copy.deepcopy(model)
    first, second = optim.SGD(model.parameters(), 0.05), optim.SGD(reference.parameters(), 0.05)
    followed = followed_by(model, first, "sum")
    factors: list[Tensor] = []
    for batch in batches(2):

        def closure(batch: Tensor = batch) -> Tensor:
            first.zero_grad()
            with followed.step(batch, y[batch], 1.0):
                loss = functional.cross_entropy(model(x[batch]), y[batch], reduction="sum")
                loss.backward()
            factors.append(torch.clamp(3 / nn.utils.clip_grad_norm_(model.parameters(), 3), max=1))
            return loss

        first.step(closure)
        second.zero_grad()
        summed = len(batch) * without(reference, batch, followed.indices)
        (factors[-1] * summed).backward()
        second.step()
    assert min(factors) < 1
    for name, weight in followed.twin.weights.items():
        torch.testing.assert_close(weight, reference.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_batch_normalisation_has_statistics_of_its_own() -> None:
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    optimizer = optim.SGD(model.parameters(), 0.5)
    followed = followed_by(model, optimizer)
    start = followed.twin.buffers["1.running_mean"].clone()
    for batch in batches(1):
        optimizer.zero_grad()
        with followed.step(batch, y[batch], 1.0):
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    mine = model.get_buffer("1.running_mean")
    assert not followed.twin.buffers["1.running_mean"].equal(start)
    assert not followed.twin.buffers["1.running_mean"].equal(mine)
    with unchanged(model):
        before = mine.clone()
        followed.twin.losses(followed.batches, followed.indices, followed.likelihood)
        assert mine.equal(before)


def test_a_compiled_model() -> None:
    x, y = data()
    model = net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    followed = followed_by(model, optimizer)
    compiled = torch.compile(model, backend="eager")
    reference = copy.deepcopy(model)
    for batch in batches(1):
        with followed.step(batch, y[batch], 1.0):
            functional.cross_entropy(compiled(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        without(reference, batch, followed.indices).backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert_same(followed.twin, reference)


def test_the_hooks_go_with_the_twin() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    twin = Twin(model, optimizer)
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
    with pytest.raises(PosteriorError, match="leave follow out"):
        Twin(model, made[kind]())


def test_steps_that_are_told_wrongly() -> None:
    x, y = data()
    model = net()
    followed = followed_by(model, optim.SGD(model.parameters(), 0.1))
    batch = torch.arange(BATCH)
    with pytest.raises(LikelihoodError, match="other gradients"), followed.step(batch, None, 1.0):
        functional.cross_entropy(model(x[batch + 1]), y[batch + 2]).backward()
    with pytest.raises(ArgumentError, match="the sum over"), followed.step(batch, None, 1.0):
        functional.cross_entropy(model(x[batch]), y[batch], reduction="sum").backward()
    with pytest.raises(EngineError, match="a call of the model"), followed.step(batch, None, 1.0):
        pass
    with pytest.raises(DataError, match="a batch without indices"), followed.step(None, None, 1.0):
        pass
    with pytest.raises(RuntimeError, match="mine"), followed.step(batch, None, 1.0):
        raise RuntimeError("mine")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
