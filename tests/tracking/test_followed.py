"""Leave-one-out weights along the training, against closed forms and against training without."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from ivon import IVON
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.nn import functional

import engram
from engram.errors import ArgumentError, DataError, PosteriorError
from engram.likelihoods import resolve
from engram.tracking.followed import Followed, expected_at

N, RATE, DECAY = 12, 0.01, 0.05


def regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(N, 1, generator=generator, dtype=torch.float64)


def line() -> nn.Module:
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def flow(weights: Tensor, time: float) -> Tensor:
    """theta(t) of the gradient flow from zero: (1 - exp(-A t)) A^-1 X'y / N, in closed form."""
    x, y = regression()
    matrix = x.mT @ (weights[:, None] * x) / N + DECAY * torch.eye(3, dtype=torch.float64)
    values, basis = torch.linalg.eigh(matrix)
    target = basis.mT @ (x.mT @ (weights[:, None] * y)) / N
    return (basis @ ((1 - torch.exp(-values * time))[:, None] / values[:, None] * target))[:, 0]


@pytest.mark.parametrize(("steps", "every"), [(20, 1), (100, 2), (400, 10)])
def test_linear_regression_by_gradient_descent_is_its_derivative(steps: int, every: int) -> None:
    """Minus d theta(t) / d weight_i of the flow, by central differences of its closed form."""
    model, (x, y) = line(), regression()
    optimizer = optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)
    followed = Followed(model, optimizer, (x, y), resolve("gaussian"), N, float(N), "ggn")
    for step in range(steps):
        optimizer.zero_grad()
        (0.5 * (model(x) - y).square().mean()).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            followed.update()
    expected = []
    for index in followed.indices.tolist():
        shift = torch.zeros(N, dtype=torch.float64)
        shift[index] = 1e-5
        expected.append((flow(1 - shift, steps * RATE) - flow(1 + shift, steps * RATE)) / 2e-5)
    truth, found = torch.stack(expected), followed.deviation["weight"][:, 0]
    assert float((found - truth).norm() / truth.norm()) < 0.03


def test_at_a_minimum_for_long_it_is_the_laplace_posterior() -> None:
    model, (x, y) = line(), regression()
    optimizer = optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)
    precision = x.mT @ x + N * DECAY * torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(precision, x.mT @ y).mT)
    followed = Followed(model, optimizer, (x, y), resolve("gaussian"), N, float(N), "ggn")
    followed.clock.restart([1e6])
    loss, left_out = followed.update()
    gradients = (x * (model(x) - y).detach())[followed.indices]
    expected = torch.linalg.solve(precision, gradients.mT).mT
    assert torch.allclose(followed.deviation["weight"][:, 0], expected, rtol=1e-9)
    posterior = engram.laplace(
        model, (x, y), likelihood="gaussian", structure="full", prior_precision=N * DECAY
    )
    result = engram.sensitivities(
        model, (x, y), posterior, likelihood="gaussian", estimator="linear"
    )
    assert loss.allclose(result.loss[followed.indices])
    assert left_out.allclose(result.loo_loss[followed.indices])


def digits(count: int) -> tuple[Tensor, Tensor]:
    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    return x[:count], torch.tensor(found.target)[:count]


def trained(without: int | None, followed: list[Followed], count: int) -> nn.Module:
    """A net in training on few digits, in whole batches, until it knows them by heart."""
    torch.manual_seed(0)
    x, y = digits(150)
    weights = torch.ones(len(y))
    if without is not None:
        weights[without] = 0
    model = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    if count:
        followed.append(Followed(model, optimizer, (x, y), resolve("categorical"), count, 150.0))
    for step in range(300):
        optimizer.zero_grad()
        losses = functional.cross_entropy(model(x), y, reduction="none")
        (losses * weights).mean().backward()
        optimizer.step()
        if count and step % 15 == 14:
            followed[0].update()
    return model


def test_against_training_without_each_example() -> None:
    found: list[Followed] = []
    model = trained(None, found, 25)
    followed = found[0]
    x, y = digits(150)
    truth, estimate = [], []
    for place, index in enumerate(followed.indices.tolist()):
        without = trained(index, [], 0)
        with torch.no_grad():
            own, out = model(x[index]), without(x[index])
        step = {n: v[place] for n, v in followed.deviation.items()}
        pushed = torch.func.jvp(
            lambda q, index=index: torch.func.functional_call(model, q, (x[index],)),
            ({n: p.detach() for n, p in model.named_parameters()},),
            (step,),
        )[1]
        truth.append(float(functional.cross_entropy(out, y[index])))
        estimate.append(float(functional.cross_entropy(own + pushed, y[index])))
    pair = torch.tensor([truth, estimate])
    assert torch.corrcoef(pair.log())[0, 1] > 0.95
    # the sum is made by the few that would be got wrong
    assert 0.5 < sum(estimate) / sum(truth) < 2
    with torch.no_grad():
        loss = float(functional.cross_entropy(model(x), y))
    assert loss < 0.2 * sum(truth) / len(truth)  # known by heart


def test_the_mean_over_all_data_is_a_regression_on_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    loss = torch.rand(30, generator=generator, dtype=torch.float64)
    left_out = loss + torch.rand(30, generator=generator, dtype=torch.float64) * loss
    line = np.polyfit(loss.numpy(), (left_out - loss).numpy(), 1)
    assert expected_at(0.7, loss, left_out) == pytest.approx(float(np.polyval(line, 0.7)))
    assert expected_at(0.7, loss[:1], left_out[:1]) == pytest.approx(float((left_out - loss)[0]))


def setting() -> tuple[nn.Module, optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    return model, optimizer, digits(60)


def epochs(model: nn.Module, optimizer: optim.Optimizer, tracker: engram.Tracker, num: int) -> None:
    x, y = digits(60)
    for _ in range(num):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        tracker.update()


def test_the_history_has_the_estimate_along_the_path() -> None:
    model, optimizer, data = setting()
    tracker = engram.Tracker(model, optimizer, data, follow=60)
    epochs(model, optimizer, tracker, 3)
    assert tracker.followed is not None
    before = {n: v.clone() for n, v in tracker.followed.deviation.items()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    result = tracker.update()  # no step since: nothing moves
    assert result is not None
    for name, value in tracker.followed.deviation.items():
        assert torch.allclose(value, before[name], rtol=1e-4, atol=1e-7)
        assert model.get_parameter(name).equal(weights[name])
    last, again = tracker.history.records[-2:]
    assert again.estimate == pytest.approx(last.estimate, rel=1e-4)
    assert again.estimate != pytest.approx(result.loo_nll, rel=1e-3)
    assert again.estimate > again.train


def test_goes_on_after_a_restart(tmp_path: Path) -> None:
    model, optimizer, data = setting()
    tracker = engram.Tracker(model, optimizer, data, follow=20)
    epochs(model, optimizer, tracker, 2)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**kept, "tracker": tracker.state_dict()}, tmp_path / "checkpoint.pt")
    tracker.save(tmp_path / "tracker")
    epochs(model, optimizer, tracker, 2)
    for way in ("state", "folder"):
        found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        model, optimizer, data = setting()
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        again = engram.Tracker(model, optimizer, data, follow=20)
        if way == "state":
            again.load_state_dict(found["tracker"])
        else:
            again.resume(tmp_path / "tracker")
        epochs(model, optimizer, again, 2)
        expected = [record.estimate for record in tracker.history]
        assert [record.estimate for record in again.history] == pytest.approx(expected, rel=1e-5)
    other = engram.Tracker(model, optimizer, data, follow=30)
    with pytest.raises(DataError, match="a state with 30 followed examples"):
        other.load_state_dict(found["tracker"])


def test_a_lost_training_is_recorded() -> None:
    model, optimizer, data = setting()
    tracker = engram.Tracker(model, optimizer, data, follow=20)
    epochs(model, optimizer, tracker, 1)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan  # type: ignore[index]
    tracker.update()
    assert math.isnan(tracker.history.records[-1].estimate)


def test_streamed_epochs_have_it_too() -> None:
    model, optimizer, (x, y) = setting()
    tracker = engram.Tracker(model, optimizer, (x, y), follow=20)
    for some in torch.arange(120).remainder(60).split(20):
        optimizer.zero_grad()
        with tracker.step(some, y[some]):
            functional.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    assert len(tracker.history) == 2
    assert all(record.estimate > record.train for record in tracker.history)


@pytest.mark.parametrize("count", [0, 61, True, 2.5])
def test_counts_that_mean_nothing(count: int) -> None:
    model, optimizer, data = setting()
    with pytest.raises(ArgumentError, match="a whole number of examples to follow, from 1 to 60"):
        engram.Tracker(model, optimizer, data, follow=count)


def test_an_optimizer_that_cannot_be_followed() -> None:
    model, _, data = setting()
    optimizer = IVON(model.parameters(), lr=0.1, ess=60, weight_decay=1e-2)
    with pytest.raises(PosteriorError, match="leave follow out"):
        engram.Tracker(model, optimizer, data, follow=10)
