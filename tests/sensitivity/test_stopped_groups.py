"""Groups left out of nets as people train them: the exact matrix with training time, and replay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.errors import ArgumentError

NUMBER, WIDTH, DECAY = 60, 4, 0.02


def regression() -> tuple[nn.Module, tuple[Tensor, Tensor], engram.Training]:
    """Linear regression in double precision, stopped after some steps of two learning rates."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUMBER, WIDTH, generator=generator).double()
    targets = inputs.sum(1, keepdim=True) + torch.randn(NUMBER, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1, bias=False).double()
    optimizer = SGD(model.parameters(), lr=0.01, weight_decay=DECAY)
    training = engram.record(optimizer, model)
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 0.01 if step < 6 else 0.02
        optimizer.zero_grad()
        ((model(inputs) - targets).square() / 2).mean().backward()
        optimizer.step()
    return model, (inputs, targets), training


def test_the_step_and_its_signals_are_those_of_the_dense_matrix() -> None:
    model, (inputs, targets), training = regression()
    posterior = engram.laplace(
        model, (inputs, targets), training=training, likelihood="gaussian", structure="full"
    )
    group = torch.tensor([1, 5, 8, 20, 21])
    removal = engram.remove(model, (inputs, targets), posterior, group, at="displaced")
    assert removal.estimator == "gauss_newton"
    assert "training time" in str(removal.matrix)
    time = 6 * 0.01 + 6 * 0.02
    kept = torch.ones(NUMBER, dtype=torch.bool).index_fill(0, group, False)
    residual = (model(inputs) - targets).detach()
    gradient = inputs[group].T @ residual[group]
    added = (NUMBER * DECAY + NUMBER / time) * torch.eye(WIDTH).double()
    matrix = inputs[kept].T @ inputs[kept] + added
    expected = torch.linalg.solve(matrix, gradient)[:, 0]
    assert removal.delta is not None
    torch.testing.assert_close(removal.delta["weight"][0], expected, rtol=1e-9, atol=1e-12)
    signals, step = removal.signals, removal.delta["weight"].T
    assert signals is not None
    rise = ((residual + inputs @ step).square() - residual.square())[kept].mean() / 2
    assert signals.remaining_change == pytest.approx(float(rise), rel=1e-6)
    assert signals.agreement == pytest.approx(1, rel=1e-6)  # the model is quadratic
    along = (inputs[group] @ step).square().sum()
    whole = (step.T * posterior.multiply({"weight": step.T})["weight"]).sum()
    assert signals.leverage == pytest.approx(float(along / whole), rel=1e-6)
    assert removal.passes is not None
    assert removal.passes <= (5 + 2 * 5 * 55) / 60
    assert not removal.flagged


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10)
    )


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """600 digits, of which the first 120 have a wrong label, and 600 to test with."""
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    images, labels = (images / 16).float(), labels.clone()
    test = (images[600:1200], labels[600:1200].clone())
    labels[:120] = (labels[:120] + 1 + torch.arange(120) % 9) % 10
    return (images[:600], labels[:600]), test


def fitted(data: tuple[Tensor, Tensor], seed: int) -> tuple[nn.Module, engram.Training]:
    torch.manual_seed(seed)
    model, loader = net(), DataLoader(TensorDataset(*data), 32, shuffle=True)
    optimizer = AdamW(model.parameters(), lr=0.005)
    training = engram.record(optimizer, model, loader=loader, replay=True)
    for _ in range(12):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    training.stop()
    return model.eval(), training


@pytest.fixture(scope="module")
def noisy() -> Any:
    data, test = digits()
    model, training = fitted(data, 0)
    posterior = engram.laplace(model, data, training=training, structure="kronecker")
    return model, data, test, training, posterior


def test_a_source_of_wrong_labels_is_right_in_sign_and_size(noisy: Any) -> None:
    model, data, test, training, posterior = noisy
    before = copy.deepcopy(model.state_dict())
    source = range(120)
    removal = engram.remove(model, data, posterior, source, evaluate_on=test, training=training)
    truths = []
    for seed in range(3):
        pair = fitted(data, seed)[0], fitted((data[0][120:], data[1][120:]), seed)[0]
        losses = [
            [float(functional.cross_entropy(m(x), y)) for m in pair]
            for x, y in (test, (data[0][:120], data[1][:120]))
        ]
        truths.append([without - with_ for with_, without in losses])
    tested, own = torch.tensor(truths).mean(0).tolist()
    assert removal.estimator == "replay"
    assert not removal.flagged
    assert removal.evaluation is not None
    assert tested < 0 < own
    assert 0.5 < removal.evaluation.change / tested < 2
    assert 0.5 < removal.group.change / own < 2
    assert removal.passes == pytest.approx(12 * 2 / 3 * 480 / 600, rel=0.15)
    assert "passes" in repr(removal)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_replay_is_the_model_that_engram_replay_gives(noisy: Any) -> None:
    model, data, test, training, posterior = noisy
    removal = engram.remove(
        model, data, posterior, [0, 3], evaluate_on=test, training=training, estimator="replay"
    )
    other = engram.replay(model, data, training, [0, 3], start=training.num_steps // 3)
    with torch.no_grad():
        assert removal.evaluation is not None
        assert removal.delta is not None
        torch.testing.assert_close(removal.evaluation.outputs_without, other(test[0]))
        torch.testing.assert_close(removal.group.outputs_without, other(data[0][[0, 3]]))
        moved = model[4].weight + removal.delta["4.weight"]
        torch.testing.assert_close(moved, other[4].weight)  # type: ignore[index]


def test_classes_by_a_replay(noisy: Any) -> None:
    model, data, test, training, posterior = noisy
    found = engram.remove_classes(model, data, posterior, evaluate_on=test, training=training)
    assert list(found) == list(range(10))
    for removal in found.values():
        assert removal.estimator == "replay"
        assert removal.evaluation is not None
        assert min(removal.group.change, removal.evaluation.change) > 0


def test_kronecker_steps_for_a_source_are_flagged(noisy: Any) -> None:
    """They underestimate the curvature along a gradient that many examples share."""
    model, data, _, _, posterior = noisy
    removal = engram.remove(model, data, posterior, range(120), estimator="linear")
    assert removal.signals is not None
    assert removal.signals.leverage is not None
    assert removal.signals.leverage > 1
    assert removal.flagged


def test_bad_input(noisy: Any) -> None:
    model, data, _, training, posterior = noisy
    with pytest.raises(ArgumentError, match=r"training=, a record that can be replayed.*got none"):
        engram.remove(model, data, posterior, [0], estimator="replay")
    with pytest.raises(ArgumentError, match="weights of 1 for a replay"):
        engram.remove(model, data, posterior, [0], weights=[0.5], training=training)
