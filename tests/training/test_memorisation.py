"""A net that knows its examples by heart, told from one that has learned."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.errors import DataError, TrainingError
from engram.training.memorisation import memorisation, prequential


def trained(epochs: int, noise: float) -> tuple[engram.Training, torch.Tensor]:
    """A wide net on two blobs, with some labels flipped: labels, flipped, losses at the end."""
    torch.manual_seed(0)
    labels = torch.arange(120) % 2
    inputs = torch.randn(120, 20) + 2.0 * labels[:, None]
    flipped = torch.rand(120) < noise
    labels = torch.where(flipped, 1 - labels, labels)
    model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=20, shuffle=True)
    training = engram.record(optimizer, model, loader=loader)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    training.stop()
    loss = functional.cross_entropy(model(inputs), labels, reduction="none").detach()
    return training, torch.stack([labels, flipped.long(), loss])


def test_flipped_labels_that_are_learned_by_heart_are_seen() -> None:
    training, (labels, flipped, loss) = trained(60, 0.1)
    found = memorisation(training, labels.long(), loss)
    wrong = flipped.bool()
    assert found.memorised[wrong].float().mean() > 0.5
    assert found.memorised[~wrong].float().mean() < 0.05
    assert found.share == float(found.memorised.float().mean())
    assert found.loss_ratio < 0.3
    own = memorisation(training, labels.long())
    assert own.loss_ratio < 0.5


@pytest.mark.parametrize(("epochs", "noise"), [(4, 0.1), (60, 0.0)])
def test_what_is_learned_is_not_memorised(epochs: int, noise: float) -> None:
    training, (labels, _, loss) = trained(epochs, noise)
    assert memorisation(training, labels.long(), loss).share < 0.02


def test_prequential_of_a_record() -> None:
    training, (labels, _, _) = trained(3, 0.1)
    found = prequential(training, labels.long())
    assert found is not None
    assert training.visits is not None
    assert torch.equal(found, training.visits.prequential(labels.long()))
    model = nn.Linear(2, 2)
    empty = engram.record(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert prequential(empty, labels) is None
    with pytest.raises(TrainingError, match="one without visits"):
        memorisation(empty, labels)
    with pytest.raises(DataError, match="a loss for each of the 120"):
        memorisation(training, labels.long(), torch.zeros(3))
