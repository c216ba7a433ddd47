"""A recorded training walked again: bit for bit, and as if some examples had never been there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import engram
from engram.errors import ArgumentError, DataError, ModelMismatchError, TrainingError

NUMBER = 90
IMAGES = torch.randn(NUMBER, 1, 8, 8, generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(3, (NUMBER,), generator=torch.Generator().manual_seed(4))
Schedule = Callable[[Optimizer], LRScheduler]
OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], Schedule | None]] = {
    "adamw": (
        lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
        lambda o: CosineAnnealingLR(o, 40),
    ),
    "sgd": (
        lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda o: OneCycleLR(o, 0.1, total_steps=60),  # momentum goes up and down with it
    ),
    "plain sgd": (lambda p: SGD(p, lr=0.05), None),
    "amsgrad": (lambda p: Adam(p, lr=0.01, amsgrad=True), None),
    "nadam": (lambda p: NAdam(p, lr=0.01), None),
    "rmsprop": (lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True), None),
}


def net(dropout: float = 0.4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(8, 3),
    )


def trained(
    kind: str = "adamw", epochs: int = 3, model: nn.Module | None = None
) -> tuple[nn.Module, Any]:
    """A shuffled training with BatchNorm, dropout and a schedule."""
    torch.manual_seed(0)
    model = net() if model is None else model
    images = IMAGES.to(next(model.parameters()))
    make, scheduled = OPTIMIZERS[kind]
    optimizer = make(model.parameters())
    schedule = None if scheduled is None else scheduled(optimizer)
    training = engram.record(optimizer, model, replay=True)
    examples = TensorDataset(images, LABELS, torch.arange(NUMBER))
    for _ in range(epochs):
        model.train()
        for inputs, targets, indices in DataLoader(examples, 16, shuffle=True):
            training.note(indices)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        model.eval()
        model(images), torch.rand(3)  # what people do between epochs
    return model, training


def same(one: nn.Module, two: nn.Module) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("start", [0, 7, 13])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bit_for_bit_where_nothing_is_left_out(kind: str, start: int) -> None:
    model, training = trained(kind)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    for loss in (functional.cross_entropy, "categorical"):
        found = engram.replay(model, (IMAGES, LABELS), training, start=start, loss=loss)
        assert same(found, before)
        assert not found.training
    assert same(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is not None for p in model.parameters())


def by_hand(model: nn.Module, without: Tensor) -> nn.Module:
    """The same training, written out, with examples taken out of their batches."""
    torch.manual_seed(0)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = CosineAnnealingLR(optimizer, 40)
    gone = torch.zeros(NUMBER, dtype=torch.bool).index_fill(0, without, True)
    examples = TensorDataset(IMAGES.double(), LABELS, torch.arange(NUMBER))
    for _ in range(3):
        model.train()
        for inputs, targets, indices in DataLoader(examples, 16, shuffle=True):
            kept = ~gone[indices]
            if kept.sum() > 1:  # one alone has no statistics
                optimizer.zero_grad()
                losses = functional.cross_entropy(
                    model(inputs[kept]), targets[kept], reduction="sum"
                )
                (losses / len(inputs)).backward()
                optimizer.step()
            schedule.step()
        model.eval()
        torch.rand(3)
    return model


@pytest.mark.parametrize("count", [1, 20, 80])
def test_left_out_examples_are_out_of_their_batches(count: int) -> None:
    """In a net without dropout: with fewer rows, other ones of its numbers go to the rest."""
    without = torch.arange(NUMBER)[:count]
    first = net(0.0).double()
    expected = by_hand(copy.deepcopy(first), without).state_dict()
    model, training = trained(model=first)
    found = engram.replay(model, (IMAGES.double(), LABELS), training, without).state_dict()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-7, rtol=1e-7)
    assert not torch.equal(found["9.weight"], model.state_dict()["9.weight"])


def test_a_left_out_example_does_not_matter_at_all() -> None:
    model, training = trained()
    other = IMAGES.clone()
    other[[3, 8]] = 100.0
    left, right = (engram.replay(model, (x, LABELS), training, [3, 8]) for x in (IMAGES, other))
    assert same(left, right)


def test_without_everything_nothing_moves() -> None:
    model, training = trained()
    found = engram.replay(model, (IMAGES, LABELS), training, range(NUMBER), start=9)
    start = max(s.step for s in training.grid.snapshots if s.step <= 9)
    kept = next(s for s in training.grid.snapshots if s.step == start).read()
    for number, parameter in enumerate(found.parameters()):
        assert torch.equal(parameter, kept[f"weight/{number}"])


class Views(Dataset[Any]):
    """Another view each time, drawn as the example is read."""

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return IMAGES[index] + 0.3 * torch.randn(1, 8, 8), LABELS[index]


def batches() -> Iterator[Tensor]:
    yield from torch.randperm(NUMBER).split(20)


def test_views_accumulation_clipping_and_groups() -> None:
    torch.manual_seed(1)
    model, data = net(), Views()
    groups = [{"params": model[:5].parameters(), "lr": 0.01}, {"params": model[5:].parameters()}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    training = engram.record(optimizer, model, replay=True)

    def clip(net: nn.Module) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)

    for epoch in range(4):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + epoch)
        for indices in batches():
            optimizer.zero_grad()
            for part in indices.chunk(2):
                training.note(part)
                items = [data[i] for i in part.tolist()]
                inputs, targets = (torch.stack(rows) for rows in zip(*items, strict=True))
                (functional.cross_entropy(model(inputs), targets) / 2).backward()
            clip(model)
            optimizer.step()
    with pytest.raises(ArgumentError, match="before_step=, which clips"):
        engram.replay(model, data, training)
    for start in (0, 11):
        given = {"loss": functional.cross_entropy, "before_step": clip, "start": start}
        assert same(engram.replay(model, data, training, **given), model)
    assert not same(engram.replay(model, data, training, [4], **given), model)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, training = trained()
    training.save(tmp_path)
    again = engram.load(tmp_path)
    fresh = net()
    for start in (0, 9):
        assert same(engram.replay(fresh, (IMAGES, LABELS), again, start=start), model)


def test_a_training_that_was_resumed() -> None:
    model, training = trained()
    torch.manual_seed(5)
    second = net()
    second.load_state_dict(model.state_dict())
    optimizer = AdamW(second.parameters(), lr=0.01, weight_decay=0.1)
    source = training._source
    optimizer.load_state_dict(source.optimizer.state_dict())
    resumed = engram.record(optimizer, second, replay=True)
    resumed.load_state_dict(training.state_dict())
    second.train()
    for indices in batches():
        resumed.note(indices)
        optimizer.zero_grad()
        functional.cross_entropy(second(IMAGES[indices]), LABELS[indices]).backward()
        optimizer.step()
    for start in (0, 9):
        assert same(engram.replay(second, (IMAGES, LABELS), resumed, start=start), second)


def test_a_displacement_is_added() -> None:
    model, training = trained("plain sgd", epochs=1)
    end = training.num_steps
    step = {"9.bias": torch.tensor([1.0, 2.0, 3.0])}
    plain, moved = (
        engram.replay(model, (IMAGES, LABELS), training, start=end - 1, displacement=d)
        for d in (None, step)
    )
    assert torch.allclose(moved[9].bias - plain[9].bias, step["9.bias"], atol=0.2)  # type: ignore[index,operator]


def test_bad_input() -> None:
    model, training = trained(epochs=1)
    data = (IMAGES, LABELS)
    plain = engram.record(SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TrainingError, match=r"record with engram.record\(optimizer, model, replay"):
        engram.replay(model, data, plain)
    with pytest.raises(DataError, match="training data with the recorded example 89"):
        engram.replay(model, (IMAGES[:50], LABELS[:50]), training)
    with pytest.raises(ArgumentError, match="indices from 0 to 89"):
        engram.replay(model, data, training, [90])
    with pytest.raises(ArgumentError, match="a whole start from 0 to 6"):
        engram.replay(model, data, training, start=7)
    with pytest.raises(ModelMismatchError, match="the model of this record"):
        engram.replay(nn.Linear(3, 2), data, training)
    with pytest.raises(ArgumentError, match="a loss function that gives one number"):
        engram.replay(model, data, training, loss=nn.CrossEntropyLoss(reduction="none"))


def test_steps_that_name_nothing() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model, replay=True)
    functional.cross_entropy(model(IMAGES), LABELS).backward()
    optimizer.step()
    with pytest.raises(TrainingError, match="the examples of step 1"):
        engram.replay(model, (IMAGES, LABELS), training)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_recorded_loader_names_the_examples(workers: int) -> None:
    torch.manual_seed(2)
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(
        TensorDataset(IMAGES, LABELS), 20, shuffle=True, num_workers=workers, drop_last=True
    )
    training = engram.record(optimizer, model, loader=loader, replay=True)
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    visits = training.visits.count.clone()
    for start in (0, 8):  # while the record goes on
        assert same(engram.replay(model, (IMAGES, LABELS), training, start=start), model)
    assert torch.equal(training.visits.count, visits)


class Own(SGD):
    """An optimizer of somebody's own."""


def test_an_optimizer_of_ones_own_is_made_by_its_maker() -> None:
    model = net()
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.5)
    training = engram.record(optimizer, model, replay=True)
    for indices in batches():
        training.note(indices)
        optimizer.zero_grad()
        functional.cross_entropy(model(IMAGES[indices]), LABELS[indices]).backward()
        optimizer.step()
    with pytest.raises(ArgumentError, match="optimizer=, which makes a"):
        engram.replay(model, (IMAGES, LABELS), training)
    assert same(engram.replay(model, (IMAGES, LABELS), training, optimizer=Own), model)
