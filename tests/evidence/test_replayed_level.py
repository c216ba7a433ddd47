"""The level of the test loss by a replay without some examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.errors import ArgumentError, TrainingError
from engram.evidence.regression_estimator import standard_error

NUMBER = 60


def data(number: int = NUMBER, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 6, generator=generator)
    noise = torch.randn(number, generator=generator)
    return x, (x[:, 0] + noise > 0).long()


def trained(epochs: int, named: bool = True) -> tuple[nn.Module, engram.Training]:
    """A net of which the labels are half noise, with BatchNorm, dropout and AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(*data()), 15, shuffle=True)
    training = engram.record(optimizer, model, replay=True, loader=loader if named else None)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            if not named:
                training.note(_positions(x))
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model, training


def _positions(x: Tensor) -> Tensor:
    return (x[:, None] == data()[0][None]).all(2).long().argmax(1)


def test_the_losses_are_those_of_a_replay_without_the_fold() -> None:
    model, training = trained(6)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    start = training.num_steps // 3
    found = engram.replayed_level(model, data(), training, share=0.2, start=start, progress=False)
    assert 0 < found.start <= start
    assert len(found.indices) == 12
    again = engram.replay(model, data(), training, found.indices, start=found.start, progress=False)
    x, y = data()
    with torch.no_grad():
        expected = functional.cross_entropy(again(x), y, reduction="none").double()
        model.eval()
        own = functional.cross_entropy(model(x), y, reduction="none").double()
        model.train()
    torch.testing.assert_close(found.loss_without, expected[found.indices])
    torch.testing.assert_close(found.loss, own[found.indices])
    assert found.train_nll == pytest.approx(float(own.mean()))
    increase = (expected - own)[found.indices].numpy()
    difficulty = training.visits.prequential(data()).double().numpy()  # type: ignore[union-attr]
    slope, offset = np.polyfit(difficulty[found.indices], increase, 1)
    level = float(own.mean()) + offset + slope * difficulty.mean()
    assert found.level == pytest.approx(level)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_it_sees_the_level_of_a_memorised_net() -> None:
    model, training = trained(80)
    found = engram.replayed_level(model, data(), training, share=0.25, progress=False)
    x, y = data(2000, seed=1)
    model.eval()
    with torch.no_grad():
        truth = float(functional.cross_entropy(model(x), y))
    assert found.train_nll < 0.15 * truth
    assert 0.6 * truth < found.level < 1.6 * truth
    assert found.start == 0
    assert "15 examples left out" in repr(found)


def test_without_visits_it_is_the_plain_mean() -> None:
    model, training = trained(3, named=False)
    found = engram.replayed_level(model, data(), training, start=0, progress=False)
    assert found.start == 0
    increase = found.loss_without - found.loss
    assert found.level == pytest.approx(found.train_nll + float(increase.mean()))
    spread = float(increase.var() * (len(increase) - 1) / (len(increase) - 2) / len(increase))
    assert found.standard_error == pytest.approx(spread**0.5)


def test_the_standard_error_is_that_of_a_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    difficulty = torch.rand(40, generator=generator, dtype=torch.float64)
    increase = 2 * difficulty + 0.1 * torch.randn(40, generator=generator, dtype=torch.float64)
    line = np.polyval(np.polyfit(difficulty.numpy(), increase.numpy(), 1), difficulty.numpy())
    left = increase.numpy() - line
    assert standard_error(increase, difficulty) == pytest.approx(np.sqrt((left**2).sum() / 38 / 40))
    assert np.isnan(standard_error(increase[:2], difficulty[:2]))


def test_what_it_cannot_do_is_said() -> None:
    model, training = trained(1)
    with pytest.raises(ArgumentError, match="share between 0 and 1"):
        engram.replayed_level(model, data(), training, share=1.0)
    with pytest.raises(ArgumentError, match="number of examples left out"):
        engram.replayed_level(model, data(), training, share=0.001)
    other = nn.Linear(6, 2)
    plain = engram.record(torch.optim.SGD(other.parameters(), lr=0.1), other)
    with pytest.raises(TrainingError, match="replay=True"):
        engram.replayed_level(other, data(), plain)
