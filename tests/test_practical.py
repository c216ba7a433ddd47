"""The loop of the practical nets: the same from a seed, watched or not, and taken by retrain."""

from __future__ import annotations

import torch
from benchmarks.practical.data import Split, class_dependent, uniform
from benchmarks.practical.loop import Recording, Setting, Watcher, cosine, flipped
from benchmarks.practical.settings import adamw, sgd
from torch import Tensor, nn

import engram

NUM_DATA = 40


def split() -> Split:
    generator = torch.Generator().manual_seed(0)
    right = torch.arange(NUM_DATA) % 3
    inputs = torch.randn(NUM_DATA, 4, generator=generator) + torch.eye(3, 4)[right]
    return Split(inputs, right.roll(1), right, inputs + 0.1, right, right)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


SETTING = Setting(split, net, adamw(1e-2, 1e-2), epochs=3, batch_size=8, schedule=cosine)


class Counting(Watcher):
    def __init__(self) -> None:
        self.visits, self.epochs = torch.zeros(NUM_DATA, dtype=torch.long), []

    def visited(self, indices: Tensor, outputs: Tensor) -> None:
        assert outputs.shape == (len(indices), 3)
        self.visits[indices] += 1

    def epoch_ended(self, epoch: int, model: nn.Module) -> None:
        self.epochs.append(epoch)
        model.eval()


def test_a_training_is_the_same_from_its_seed_watched_or_not() -> None:
    watcher = Counting()
    first, again, other = SETTING.train(1), SETTING.train(1, watcher), SETTING.train(2)
    inputs = split().inputs
    assert torch.equal(first(inputs), again(inputs))
    assert not torch.equal(first(inputs), other(inputs))
    assert watcher.epochs == [1, 2, 3]
    assert (watcher.visits == 3).all()


def test_a_training_is_recorded() -> None:
    recording = Recording(checkpoints=2)
    model = SETTING.train(0, recording)
    assert recording.training.num_steps == 3 * 5
    assert set(recording.training.of(model).time) == {name for name, _ in model.named_parameters()}
    inputs = split().inputs
    assert torch.equal(model(inputs), SETTING.train(0)(inputs))


def test_retrain_takes_the_loop() -> None:
    setting = Setting(split, net, sgd(0.05, 5e-4), epochs=2, batch_size=16)
    truth = engram.retrain(net, split().data, train=setting.fit, subsets=14, progress=False)
    assert truth.trained_by == "function Setting.fit"
    assert truth.num_trainings == 14


def test_wrong_labels_are_others() -> None:
    generator, labels = torch.Generator().manual_seed(0), torch.arange(10).repeat(50)
    drawn = uniform(labels, generator)
    assert (drawn != labels).all()
    assert set(drawn.tolist()) == set(range(10))
    assert (class_dependent(labels, generator) != labels).all()


def test_images_are_flipped_whole() -> None:
    images = torch.randn(64, 3, 5, 5)
    seen = flipped(images)
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(seen, images, strict=True)]
    plain = [torch.equal(a, b) for a, b in zip(seen, images, strict=True)]
    assert all(m != p for m, p in zip(mirrored, plain, strict=True))
    assert 10 < sum(mirrored) < 54
