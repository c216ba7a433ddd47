"""Where an experiment runs: its data, its seed, and a folder in which finished stages are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

import engram
from experiments.panel import Outcome, Scale

COLOUR = ("cifar10", "cifar10_10k")
TWO_CLASSES = "usps_3v5"


@dataclass(frozen=True, eq=False)
class Data:
    """Images and labels to train on and to test on, and the names of the classes."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]

    @property
    def num_train(self) -> int:
        """N."""
        return len(self.train[1])


@dataclass(frozen=True)
class Workplace:
    """Of one run of one panel.

    Args:
        folder: where its stages and its outcome are kept; a run goes on with what is there.
        seed: of all random numbers.
        data_dir: folder of data sets; None for those that engram finds.
        progress: show bars.
    """

    folder: Path
    seed: int = 0
    data_dir: str | None = None
    progress: bool = True

    def data(self, name: str, scale: Scale) -> Data:
        """The images of a data set, as many as the scale has; digits stand in where it says so."""
        chosen = scale.data or name
        if chosen == "digits":
            return _digits(name, scale)
        found = engram.data.load(chosen, self.data_dir, progress=self.progress)
        train = _some(found.train, scale.num_train, self.seed)
        return Data(train, _some(found.test, scale.num_test, self.seed), found.classes)

    def stage(self, name: str, make: Callable[[], Outcome]) -> Outcome:
        """What a stage came to: read where it is finished, else made and kept."""
        path = self.folder / "stages" / name
        if path.with_suffix(".json").is_file():
            return read(path)
        began = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            found = make()
        seconds = time.perf_counter() - began
        kept = Outcome({**found.numbers, "seconds": round(seconds, 2)}, found.arrays)
        write(path, kept)
        return kept

    def generator(self) -> torch.Generator:
        """Random numbers of this run's seed."""
        return torch.Generator().manual_seed(self.seed)


def write(path: Path, outcome: Outcome) -> None:
    """Numbers as JSON, written last, and arrays beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: tensor.detach().contiguous() for name, tensor in outcome.arrays.items()}
    if arrays:
        save_file(arrays, path.with_suffix(".safetensors"))
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps(dict(outcome.numbers), indent=1) + "\n")
    unfinished.replace(path.with_suffix(".json"))


def read(path: Path) -> Outcome:
    """What :func:`write` was given."""
    numbers = json.loads(path.with_suffix(".json").read_text())
    file = path.with_suffix(".safetensors")
    return Outcome(numbers, load_file(file) if file.is_file() else {})


def _some(part: tuple[Tensor, Tensor], count: int | None, seed: int) -> tuple[Tensor, Tensor]:
    images, labels = part
    if count is None or count >= len(labels):
        return images, labels
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
    return images[chosen], labels[chosen]


def _digits(name: str, scale: Scale) -> Data:
    """Handwritten digits of scikit-learn in the shape of another data set."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    classes = tuple(map(str, range(10)))
    side = {True: 32, False: 28}[name in COLOUR]
    if name == TWO_CLASSES:
        side, kept = 16, (labels == 3) | (labels == 5)
        images, labels, classes = images[kept], (labels[kept] == 5).long(), ("3", "5")
    images = functional.interpolate(images, size=(side, side), mode="bilinear")
    images = images.expand(-1, 3, -1, -1).contiguous() if name in COLOUR else images
    first = scale.num_train or 200
    last = first + (scale.num_test or 100)
    return Data((images[:first], labels[:first]), (images[first:last], labels[first:last]), classes)
