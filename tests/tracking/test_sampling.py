"""Expectations over sampled weights, both forms, against Jacobians built row by row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError
from streamed import NUM_DATA, backward, build, data

SAMPLES, SEED = 3, 5


def jacobian(model: nn.Module, index: int) -> tuple[Tensor, Tensor]:
    """J [K, P] and e [K] of one example."""
    x, y = data()
    outputs = model(x[index : index + 1])[0]
    rows = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in outputs]
    error = outputs.softmax(0) - functional.one_hot(y[index], 3)
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]), error.detach()


def dense(model: nn.Module, posterior: Any, expectation: str, estimator: str) -> Tensor:
    """Deviations of all examples, by the formula; V or diag(V) by a mask over outputs."""
    generator = torch.Generator().manual_seed(SEED)
    ones = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    precision = torch.cat([v.flatten() for v in posterior.multiply(ones).values()])
    mask = torch.eye(3).double() if estimator == "paper" else torch.ones(3, 3).double()
    total = torch.zeros(NUM_DATA, 3, dtype=torch.float64)
    for _ in range(SAMPLES):
        draw = posterior.sample(1, generator)
        other = copy.deepcopy(model)
        other.load_state_dict({name: value[0] for name, value in draw.items()})
        for i in range(NUM_DATA):
            there, error = jacobian(other, i)
            left = there if expectation == "deviation" else jacobian(model, i)[0]
            total[i] += ((left / precision) @ there.mT * mask) @ error / SAMPLES
    return total


@pytest.mark.parametrize("estimator", ["auto", "linear", "paper"])
@pytest.mark.parametrize("expectation", ["gradient", "deviation"])
def test_samples_are_the_dense_expectation(expectation: str, estimator: str) -> None:
    model, optimizer = build()
    backward(model, torch.arange(NUM_DATA))
    optimizer.step()
    given = {"samples": SAMPLES, "expectation": expectation, "estimator": estimator}
    tracker = engram.Tracker(model, optimizer, data(), posterior="optimizer", **given)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = tracker.update(seed=SEED)
    assert result is not None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    expected = dense(
        model, tracker.posterior(), expectation, {"auto": "linear"}.get(estimator, estimator)
    )
    torch.testing.assert_close(result.deviation, expected)
    x, y = data()
    outputs = model(x).detach()
    loo = functional.cross_entropy(outputs + expected, y, reduction="none")
    torch.testing.assert_close(result.loo_loss, loo)
    probability = outputs.softmax(1)
    change = (outputs + expected).softmax(1) - probability
    if estimator == "paper":
        change = probability * (1 - probability) * expected
    torch.testing.assert_close(result.prediction_deviation, change)
    torch.testing.assert_close(result.score, change.abs().sum(1))
    settings = result.provenance["settings"]
    assert (settings["samples"], settings["expectation"]) == (SAMPLES, expectation)
    again = tracker.update(seed=SEED)
    assert again is not None
    assert again.deviation.equal(result.deviation)


def test_the_two_forms_are_one_where_the_model_is_linear() -> None:
    """J is the same everywhere, so that only the error is averaged."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        backward(model, torch.arange(NUM_DATA))
        optimizer.step()
    found = []
    for expectation in ("gradient", "deviation"):
        tracker = engram.Tracker(model, optimizer, data(), samples=4, expectation=expectation)
        result = tracker.update()
        assert result is not None
        found.append(result.deviation)
    torch.testing.assert_close(found[0], found[1])


def test_the_gradient_is_averaged_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build("convolutions")
    backward(model, torch.arange(NUM_DATA))
    optimizer.step()
    tracker = engram.Tracker(model, optimizer, data(), samples=2)
    whole = tracker.update()
    monkeypatch.setattr("engram.sensitivity.sampling.GRADIENT_BYTES", 5 * 8 * 60)
    parts = tracker.update()
    assert whole is not None
    assert parts is not None
    torch.testing.assert_close(parts.deviation, whole.deviation)


@pytest.mark.parametrize("estimator", ["corrected", "iterated", "newton", "downdated"])
def test_an_expected_gradient_has_no_other_rules(estimator: str) -> None:
    model, optimizer = build()
    with pytest.raises(ArgumentError, match=r'expectation="deviation"'):
        engram.Tracker(model, optimizer, data(), samples=2, estimator=estimator)
    tracker = engram.Tracker(model, optimizer, data(), estimator=estimator)
    with pytest.raises(ArgumentError, match=r'expectation="deviation"'):
        tracker.update(samples=2)
    with pytest.raises(ArgumentError, match=r"gradient.*deviation"):
        engram.Tracker(model, optimizer, data(), expectation="loss")


@pytest.mark.parametrize(
    ("posterior", "estimators"),
    [
        ("optimizer", ["linear", "corrected", "iterated", "paper"]),
        ("kronecker", ["downdated", "linear", "corrected", "iterated", "paper"]),
        ("full", ["corrected", "linear", "iterated", "paper"]),
    ],
)
def test_every_documented_estimator_is_taken(posterior: str, estimators: list[str]) -> None:
    """The first is the default, here as in sensitivities."""
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=1 / NUM_DATA)
    for _ in range(30):
        optimizer.zero_grad()
        backward(model, torch.arange(NUM_DATA))
        optimizer.step()
    for estimator in ("auto", *estimators):
        given = {"posterior": posterior, "estimator": estimator, "prior_precision": 1.0}
        tracker = engram.Tracker(model, optimizer, data(), **given)
        result = tracker.update()
        expected = engram.sensitivities(
            model, data(), tracker.posterior(), estimator=estimator, progress=False
        )
        assert result is not None
        assert result.provenance["settings"]["estimator"] == (
            estimators[0] if estimator == "auto" else estimator
        )
        assert result.loo_loss.equal(expected.loo_loss)
    with pytest.raises(ArgumentError, match=r"newton, downdated"):
        engram.Tracker(model, optimizer, data(), estimator="exact")
