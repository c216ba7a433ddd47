"""How many segments of a recorded training are gone along, as it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 4, generator=generator), torch.arange(40) % 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
        training = engram.record(optimizer, model)
        for _ in range(20):
            for rows in torch.randperm(40).split(8):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
                optimizer.step()
    model.eval()
    posterior = engram.laplace(
        model, data, structure="kronecker", training=training, progress=False
    )
    return model, data, posterior


def estimated(recorded: tuple[Any, Any, Any], **asked: Any) -> engram.Result:
    model, data, posterior = recorded
    return engram.sensitivities(model, data, posterior, progress=False, **asked)


def test_a_number_is_what_is_gone_along(recorded: tuple[Any, Any, Any]) -> None:
    four, eight = estimated(recorded, segments=4), estimated(recorded, segments=8)
    assert eight.provenance["settings"]["segments"] == 8
    assert not torch.allclose(four.loo_loss, eight.loo_loss)
    assert four.loss.equal(eight.loss)


def test_left_alone_it_is_four_of_a_training_of_many_epochs(
    recorded: tuple[Any, Any, Any],
) -> None:
    torch.testing.assert_close(
        estimated(recorded).loo_loss, estimated(recorded, segments=4).loo_loss
    )


def test_more_than_there_are_checkpoints(recorded: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ArgumentError, match="as many checkpoints were recorded") as caught:
        estimated(recorded, segments=1000)
    assert "engram.record(..., checkpoints=1000)" in str(caught.value)


def test_segments_of_the_end_alone(recorded: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ArgumentError, match='estimator="trajectory"'):
        estimated(recorded, segments=4, estimator="linear")


@pytest.mark.parametrize("count", [0, 1.5, "eight"])
def test_what_is_no_number_of_segments(recorded: tuple[Any, Any, Any], count: Any) -> None:
    with pytest.raises(ArgumentError, match="number of segments"):
        estimated(recorded, segments=count)
