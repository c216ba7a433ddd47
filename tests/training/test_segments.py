"""Segments and checkpoints of a training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import engram
from engram.errors import ModelMismatchError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """The last layer's weights after every step."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 4)
        nn.functional.mse_loss(model(inputs), inputs[:, :2]).backward()
        optimizer.step()
        found.append(model[3].weight.detach().clone())  # type: ignore[index]
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_segments_cover_the_training(kind: type[torch.optim.Optimizer], count: int) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model)
    weights = stepped(model, optimizer, 143)
    named = training.of(model)
    segments = named.segments(count)
    assert len(segments) == count
    assert [segments[0].start, segments[-1].end] == [0, 143]
    for one, two in pairwise(segments):
        assert one.end == two.start
    for name, time in named.time.items():
        torch.testing.assert_close(sum(s.time[name] for s in segments), time)
        torch.testing.assert_close(sum(s.decay[name] for s in segments), named.decay[name])
    for segment in segments:
        assert segment.start <= segment.middle.step <= segment.last.step == segment.end
        for checkpoint in (segment.middle, segment.last):
            saved = checkpoint.weights["3.weight"]
            torch.testing.assert_close(saved, weights[checkpoint.step - 1], rtol=0, atol=0)


def test_segments_have_about_equal_time() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model, num_steps=240)
    for step in range(240):
        optimizer.param_groups[0]["lr"] = 0.02 if step < 120 else 0.01
        stepped(model, optimizer, 1)
    segments = training.of(model).segments(3)
    assert [segment.end for segment in segments] == [60, 120, 240]
    for segment, middle in zip(segments, [30, 90, 180], strict=True):
        assert abs(segment.middle.step - middle) <= 10


def test_a_checkpoint_is_loaded_and_taken_back() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model)
    weights = stepped(model, optimizer, 40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint = training.of(model).segments(2)[0].last
    with checkpoint.loaded(model):
        assert torch.equal(model[3].weight, weights[checkpoint.step - 1])
        assert model[1].num_batches_tracked == checkpoint.step
    with pytest.raises(TypeError), checkpoint.loaded(model):
        model(None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_without_a_model_there_are_no_buffers() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer)
    stepped(model, optimizer, 10)
    checkpoint = training.of(model).segments(1)[0].last
    assert not checkpoint.has_buffers
    with checkpoint.loaded(model):
        assert model[1].num_batches_tracked == 10  # type: ignore[union-attr]


def test_few_checkpoints_or_none_give_fewer_segments() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, checkpoints=0)
    stepped(model, optimizer, 10)
    segments = training.of(model).segments(6)
    assert [(s.start, s.end, s.middle.step) for s in segments] == [(0, 10, 10)]


def test_the_grid_stays_small() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model, checkpoints=2)
    stepped(model, optimizer, 300)
    assert 4 <= len(training.grid.snapshots) <= 8
    assert training.grid.snapshots[0].step == 0


def test_what_is_too_large_for_memory_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.training.checkpoints.MEMORY", 100)
    model = net()
    optimizer = Adam(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model, folder=tmp_path / "run")
    weights = stepped(model, optimizer, 100)
    files = list((tmp_path / "run").iterdir())
    assert len(files) == len(training.grid.snapshots) == 4
    checkpoint = training.of(model).segments(2)[0].last
    assert torch.equal(checkpoint.weights["3.weight"], weights[checkpoint.step - 1])
    for file in files:
        file.unlink()
    with pytest.raises(engram.errors.StorageError, match=f"checkpoint of step {checkpoint.step}"):
        _ = checkpoint.weights


def test_another_model_is_refused() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer)
    stepped(model, optimizer, 2)
    with pytest.raises(ModelMismatchError, match="6 trained parameters"):
        training.of(nn.Linear(2, 2))
    assert training.of(net()).time["0.weight"].item() == pytest.approx(0.2)


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_whole_training_has_the_roots_of_its_middle(kind: type[torch.optim.Optimizer]) -> None:
    """Gradients that grow tenfold: the small ones' roots do not go with the large ones."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = kind(model.parameters(), lr=0.01)
    training = engram.record(optimizer, num_steps=80)
    for step in range(80):
        large = 10.0 if step >= 8 else 1.0
        model.weight.grad = torch.tensor([[large, large if step >= 60 else 0.0]])
        optimizer.step()
    (whole,) = training.of(model).segments(1)
    times = (whole.time, whole.time_of_middle)
    summed, present = (t["weight"][0] if t["weight"].dim() else t["weight"] for t in times)
    if kind is SGD:
        torch.testing.assert_close(present, summed)
    else:
        assert float(present[0]) == pytest.approx(
            0.8 / 9, rel=0.05
        )  # a tenth of its squares are small
        assert float(summed[0]) > 1.5 * float(present[0])
        assert float(present[1]) <= float(summed[1])  # reached late
    for segment in training.of(model).segments(3):
        torch.testing.assert_close(segment.time_of_middle, segment.time)
