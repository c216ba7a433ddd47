"""What the optimizer's weight decay means as a prior, by group and reduction, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ivon
import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, PosteriorError
from engram.optimizers import Newton
from engram.posteriors.optimizer_state import OPTIMIZERS, Reading, register
from worked_problems import NUM_DATA, classes, line, logistic, network

Make = Callable[..., torch.optim.Optimizer]


def diagonal(posterior: engram.Posterior) -> dict[str, Tensor]:
    return posterior.multiply({n: torch.ones_like(m) for n, m in posterior.mean.items()})


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, sign: int = 1, reduction: str = "mean"
) -> None:
    x, y = classes()
    for _ in range(3):
        optimizer.zero_grad()
        (sign * nn.functional.cross_entropy(model(x), y, reduction=reduction)).backward()
        optimizer.step()


def by_layer(model: nn.Module, first: float, second: float) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "weight_decay": first},
        {"params": model[2].parameters(), "weight_decay": second},
    ]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("second", [0.3, 0.0])
def test_groups_have_their_own_priors(make: Make, second: float) -> None:
    model = network()
    optimizer = make(by_layer(model, 0.1, second), lr=1e-3)
    train(model, optimizer)
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    for name, value in diagonal(posterior).items():
        parameter = dict(model.named_parameters())[name]
        state = optimizer.state[parameter]
        if "square_avg" in state:
            root = state["square_avg"].sqrt()
        else:
            root = (state["exp_avg_sq"] / (1 - 0.999**3)).sqrt()
        delta = NUM_DATA * (0.1 if name.startswith("0.") else second)
        torch.testing.assert_close(value, NUM_DATA * root + delta)
        assert posterior.prior_of(name) == pytest.approx(delta)
        assert posterior.settings["prior_precision"][name] == pytest.approx(delta)
    # 16 entries of the first layer, 15 of the second
    assert posterior.prior_precision == pytest.approx(NUM_DATA * (16 * 0.1 + 15 * second) / 31)
    decoupled = make is torch.optim.AdamW
    expected = "decoupled weight decay" if decoupled else "weight decay"
    assert posterior.settings["prior_from"] == expected
    assert engram.sensitivities(model, classes(), posterior, progress=False).loo_nll > 0


def test_different_priors_reach_the_diagnosis_and_the_record() -> None:
    x, y = logistic()
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    groups = [
        {"params": [model.weight], "prior_precision": 3.0},
        {"params": [model.bias], "prior_precision": 0.2},
    ]
    optimizer = Newton(groups, num_data=NUM_DATA, prior_precision=1.0)
    for _ in range(15):
        optimizer.step(lambda: nn.functional.binary_cross_entropy_with_logits(model(x), y))
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA, likelihood="bernoulli")
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    assert result.diagnostics.relative_gradient < 1e-12
    recorded = result.provenance["settings"]["posterior"]
    assert recorded["prior_precision"] == {"weight": 3.0, "bias": 0.2}
    assert recorded["prior_from"] == "optimizer"
    assert recorded["reduction"] == "mean"
    engram.remove(model, (x, y), posterior, indices=[0, 1], progress=False)


def test_one_prior_is_recorded_as_a_number() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    train(model, optimizer)
    posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert posterior.settings["prior_precision"] == pytest.approx(4.0)
    assert posterior.prior_by_name == {}
    given = engram.posterior_of(optimizer, model, num_data=NUM_DATA, prior_precision=7.0)
    assert given.settings["prior_precision"] == 7.0
    assert given.settings["prior_from"] == "argument"


def test_a_decoupled_decay_does_not_know_the_scale_of_the_loss() -> None:
    found = []
    for reduction in ("mean", "sum"):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), eps=0.0, weight_decay=0.1)
        train(model, optimizer, reduction=reduction)
        posterior = engram.posterior_of(
            optimizer, model, num_data=NUM_DATA, reduction=reduction, training_batch_size=NUM_DATA
        )
        found.append(posterior)
        assert posterior.settings["reduction"] == reduction
    for name, value in diagonal(found[0]).items():
        torch.testing.assert_close(diagonal(found[1])[name], value)
        torch.testing.assert_close(found[0].mean[name], found[1].mean[name])


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_maximising_the_negative_loss_is_the_same(make: Make) -> None:
    found = []
    for maximize in (False, True):
        model = network()
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.1, maximize=maximize)
        train(model, optimizer, sign=-1 if maximize else 1)
        found.append(diagonal(engram.posterior_of(optimizer, model, num_data=NUM_DATA)))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_ivon_takes_its_own_sample_size_and_honours_the_argument() -> None:
    model = network()
    optimizer = ivon.IVON(by_layer(model, 0.1, 0.2), lr=0.1, ess=30.0)
    with optimizer.sampled_params(train=True):
        nn.functional.cross_entropy(model(classes()[0]), classes()[1]).backward()
    optimizer.step()
    own = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert own.prior_of("2.bias") == pytest.approx(6.0)
    given = engram.posterior_of(optimizer, model, num_data=NUM_DATA, prior_precision=9.0)
    difference = diagonal(given)["2.bias"] - diagonal(own)["2.bias"]
    torch.testing.assert_close(difference, torch.full((3,), 3.0, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="mean loss"):
        engram.posterior_of(
            optimizer, model, num_data=NUM_DATA, reduction="sum", training_batch_size=4
        )


class Passing(torch.optim.Optimizer):
    """Passes steps on, as accelerate's optimizer does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_read_through() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    train(model, optimizer)
    wrapped = engram.posterior_of(Passing(optimizer), model, num_data=NUM_DATA)
    plain = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert wrapped.structure == "Adam"
    assert wrapped.log_det() == plain.log_det()


class Unheard(torch.optim.Optimizer):
    """Of a kind that engram does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"weight_decay": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["v"] = p.grad**2


def test_an_unknown_optimizer_can_be_taught() -> None:
    model = line(2)
    optimizer = Unheard(model.parameters())
    model(torch.ones(1, 2).double()).sum().backward()
    optimizer.step()
    with pytest.raises(PosteriorError, match=r"Adam.*IVON.*VON.*optimizer_state\.register"):
        engram.posterior_of(optimizer, model, num_data=10)

    def adapter(reading: Reading) -> Tensor:
        return reading.scaled(reading.state["v"].sqrt())

    register("Unheard", adapter)
    try:
        posterior = engram.posterior_of(optimizer, model, num_data=10)
    finally:
        del OPTIMIZERS["Unheard"]
    torch.testing.assert_close(diagonal(posterior)["weight"], torch.full((1, 2), 11.0).double())


def test_states_that_are_too_young_or_of_another_kind() -> None:
    model = network()
    adagrad = torch.optim.Adagrad(model.parameters(), weight_decay=0.1)  # has sums from the start
    with pytest.raises(PosteriorError, match=r"taken a step.*Adagrad without state"):
        engram.posterior_of(adagrad, model, num_data=NUM_DATA)
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    train(model, adam)
    adam.param_groups[0]["amsgrad"] = True  # its maxima were never kept
    with pytest.raises(PosteriorError, match=r"max_exp_avg_sq.*register"):
        engram.posterior_of(adam, model, num_data=NUM_DATA)


def test_reductions_that_cannot_be() -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    train(model, adam)
    with pytest.raises(ArgumentError, match="one of mean, sum"):
        engram.posterior_of(adam, model, num_data=NUM_DATA, reduction="none")
    with pytest.raises(ArgumentError, match=r"from 1 to 40; got 41"):
        engram.posterior_of(adam, model, num_data=NUM_DATA, reduction="sum", training_batch_size=41)
    plain = torch.optim.Adam(by_layer(model, 0.0, 0.0), lr=0.1)
    with pytest.raises(ArgumentError, match="pass prior_precision"):
        engram.posterior_of(plain, model, num_data=NUM_DATA)
