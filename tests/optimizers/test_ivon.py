"""The guard around the real ivon.IVON: what it mends is shown to be broken without it."""

from __future__ import annotations

import copy

import ivon
import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, PosteriorError
from engram.optimizers.ivon import load_state_dict, sampled, state_dict
from worked_problems import NUM_DATA, classes, network


def make(model: nn.Module) -> ivon.IVON:
    return ivon.IVON(model.parameters(), lr=0.1, ess=NUM_DATA, hess_init=0.5, weight_decay=0.1)


def backward(model: nn.Module) -> None:
    x, y = classes()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def train(model: nn.Module, optimizer: ivon.IVON, steps: int) -> None:
    for _ in range(steps):
        with sampled(optimizer):
            backward(model)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(left, right, strict=True))


def test_the_guard_trains_as_ivon_does() -> None:
    guarded, plain = network(), network()
    one, other = make(guarded), make(plain)
    torch.manual_seed(0)
    train(guarded, one, 4)
    torch.manual_seed(0)
    for _ in range(4):
        with other.sampled_params(train=True):
            backward(plain)
        other.step()
    assert same(weights(guarded), weights(plain))


def test_after_an_exception_the_weights_are_the_mean() -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, 1)
    with sampled(optimizer):  # a first good sample of the step
        backward(model)
    collected, before = copy.deepcopy(dict(optimizer.state)), weights(model)
    during = []

    def fail() -> None:
        during.extend(weights(model))
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), sampled(optimizer):
        fail()
    assert not same(during, before)
    assert same(weights(model), before)
    assert optimizer.state["count"] == collected["count"] == 1
    assert optimizer.state["avg_grad"].equal(collected["avg_grad"])
    with pytest.raises(RuntimeError, match="on purpose"), optimizer.sampled_params(train=True):
        raise RuntimeError("on purpose")
    assert not same(weights(model), before)  # ivon alone leaves the noise in


def test_a_parameter_without_gradient_counts_as_having_a_zero_one() -> None:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = make(model)
    before = weights(model)
    with sampled(optimizer):
        backward(model)
    assert same(weights(model), before)
    assert model.unused.grad is None
    assert float(optimizer.state["avg_grad"][:2].abs().sum()) == 0.0
    optimizer.step()
    with pytest.raises(AttributeError), optimizer.sampled_params(train=True):
        backward(model)


def test_a_checkpoint_goes_on_bit_by_bit() -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), state_dict(optimizer), optimizer.state_dict()))
    torch.manual_seed(5)
    train(model, optimizer, 3)
    ends = []
    for load in (lambda o: load_state_dict(o, saved[1]), lambda o: o.load_state_dict(saved[2])):
        other = network(seed=8)
        resumed = make(other)
        other.load_state_dict(saved[0])
        load(resumed)
        torch.manual_seed(5)
        train(other, resumed, 3)
        ends.append(weights(other))
    assert same(ends[0], weights(model))
    assert not same(ends[1], weights(model))  # ivon alone has forgotten its number of steps


def test_a_resumed_optimizer_can_be_read_at_once() -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, 2)
    resumed = make(model)
    load_state_dict(resumed, state_dict(optimizer))
    read = [engram.posterior_of(o, model, num_data=NUM_DATA) for o in (optimizer, resumed)]
    assert read[0].log_det() == read[1].log_det()
    assert read[0].settings["prior_from"] == "ess times weight decay"


def test_no_posterior_is_read_while_the_weights_are_a_draw() -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, 1)
    with sampled(optimizer, train=False):
        with pytest.raises(PosteriorError, match="outside of the block"):
            engram.posterior_of(optimizer, model, num_data=NUM_DATA)
        with pytest.raises(ArgumentError, match="one draw at a time"), sampled(optimizer):
            pass
    engram.posterior_of(optimizer, model, num_data=NUM_DATA)


def test_several_samples_and_a_closure_and_a_schedule() -> None:
    model = network()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=NUM_DATA, mc_samples=3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

    def closure() -> Tensor:
        with sampled(optimizer):
            backward(model)
            return nn.functional.cross_entropy(model(classes()[0]), classes()[1]).detach()

    before = weights(model)
    assert optimizer.step(closure).isfinite()
    schedule.step()
    assert not same(weights(model), before)
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_bad_input_says_what_to_do() -> None:
    model = network()
    optimizer = make(model)
    with pytest.raises(ArgumentError, match=r"engram\.optimizers\.ivon\.state_dict"):
        load_state_dict(optimizer, optimizer.state_dict())
    with pytest.raises(ArgumentError, match="need no guard"):
        state_dict(torch.optim.Adam(model.parameters()))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ArgumentError, match=r"frozen ones.*requires_grad"), sampled(optimizer):
        pass


def test_the_other_traps_that_the_docs_name_are_there() -> None:
    model = network()
    optimizer = make(model)
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.current_step == 1
    model[0].weight.requires_grad_(False)
    fresh, before = make(model), model[0].weight.clone()
    with fresh.sampled_params(train=True):
        assert not model[0].weight.equal(before)
        backward(model)
    fresh.step()
    assert model[0].weight.norm() < before.norm()


def test_without_its_corrections_it_is_the_printed_update() -> None:
    """The paper's iBLR, in the notation of its appendix, from the draws that IVON made."""
    model = network()
    rate, beta1, beta2, delta, initial = 0.05, 0.9, 0.9, 0.2, 0.5
    optimizer = ivon.IVON(
        model.parameters(),
        lr=rate,
        ess=NUM_DATA,
        hess_init=initial,
        beta1=beta1,
        beta2=beta2,
        weight_decay=delta,
        debias=False,
        rescale_lr=False,
    )
    m = torch.cat([p.detach().flatten() for p in model.parameters()])
    g, h = torch.zeros_like(m), torch.full_like(m, initial)
    torch.manual_seed(3)
    for _ in range(6):
        with sampled(optimizer):
            backward(model)
            theta = torch.cat([p.detach().flatten() for p in model.parameters()])
            slope = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
        variance = 1 / (NUM_DATA * (h + delta))
        curve = slope * (theta - m) / variance
        g = beta1 * g + (1 - beta1) * slope
        h = (
            beta2 * h
            + (1 - beta2) * curve
            + 0.5 * (1 - beta2) ** 2 * (h - curve).square() / (h + delta)
        )
        m = m - rate * (g + delta * m) / (h + delta)
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(found, m, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(optimizer.param_groups[0]["hess"], h, rtol=1e-4, atol=1e-6)
