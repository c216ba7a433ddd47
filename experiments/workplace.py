"""Where an experiment runs: its data, its seed, and a folder in which finished stages are kept."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

import engram
from experiments.panel import Outcome, Scale

SECONDS = "seconds"  # of a stage, by the processor and by the clock
COLOUR = ("cifar10", "cifar10_10k")
TWO_CLASSES = "usps_3v5"
# training images of the paper's experiments
WHOLE = {"mnist": 60_000, "fmnist": 60_000, "cifar10": 50_000, "usps_3v5": 1214}


@dataclass(frozen=True, eq=False)
class Data:
    """Images and labels to train on and to test on.

    Args:
        train, test: pixels from 0 to 1, and labels.
        classes: names of the labels.
        whole: how many training images the paper has of this data set.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    whole: int

    @property
    def num_train(self) -> int:
        """N."""
        return len(self.train[1])

    @property
    def share(self) -> float:
        """Of the paper's images: what multiplies its delta, which stands beside a sum of losses."""
        return self.num_train / self.whole

    def standardised(self) -> Data:
        """Each channel of the training images with mean zero and variance one.

        The paper does not say so, and its learning rates need it: with pixels from 0 to 1 its
        nets end several per cent below the accuracies that it states.
        """
        images = self.train[0]
        mean, deviation = (f((0, 2, 3), keepdim=True) for f in (images.mean, images.std))
        train, test = (
            ((part - mean) / deviation, labels) for part, labels in (self.train, self.test)
        )
        return replace(self, train=train, test=test)


@dataclass(frozen=True)
class Workplace:
    """Of one run of one panel.

    Args:
        folder: of all panels of one scale and seed; a run goes on with what is there.
        part: of the folder, where stages are kept.
        seed: of all random numbers.
        data_dir: folder of data sets; None for those that engram finds.
        progress: show bars.
        seconds: processor time of the stages that were asked for, in this run or an earlier one,
            and time by the clock.
    """

    folder: Path
    part: Path = Path()
    seed: int = 0
    data_dir: str | None = None
    progress: bool = True
    seconds: list[list[float]] = field(default_factory=list)

    def data(self, name: str, scale: Scale) -> Data:
        """The images of a data set, as many as the scale has; digits stand in where it says so."""
        chosen = scale.data or name
        if chosen == "digits":
            return _digits(name, scale)
        found = engram.data.load(chosen, self.data_dir, progress=self.progress)
        train = _some(found.train, scale.num_train, self.seed)
        test = _some(found.test, scale.num_test, self.seed)
        return Data(train, test, found.classes, WHOLE[name])

    def stage(self, name: str, make: Callable[[], Outcome]) -> Outcome:
        """What a stage came to: read where it is finished, else made and kept."""
        path = self.own / name
        if beside(path, ".json").is_file():
            kept = read(path)
            self.seconds.append(kept.numbers[SECONDS])
            return kept
        began = time.process_time(), time.monotonic()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            found = make()
        taken = [time.process_time() - began[0], time.monotonic() - began[1]]
        kept = Outcome({**found.numbers, SECONDS: taken}, found.arrays)
        write(path, kept)
        self.seconds.append(kept.numbers[SECONDS])
        return kept

    @property
    def own(self) -> Path:
        """Folder of the stages."""
        return self.folder / self.part

    def at(self, name: str, *settings: object) -> Workplace:
        """The part for what has these settings; what was made with others is not gone on with."""
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        return replace(self, part=Path(name) / digest)

    def generator(self) -> torch.Generator:
        """Random numbers of this run's seed."""
        return torch.Generator().manual_seed(self.seed)


def beside(path: Path, ending: str) -> Path:
    """A file of a stage, whose name may have a dot of its own, as h0-0.05 has."""
    return path.with_name(path.name + ending)


def write(path: Path, outcome: Outcome) -> None:
    """Numbers as JSON, written last, and arrays beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: tensor.detach().contiguous() for name, tensor in outcome.arrays.items()}
    if arrays:
        save_file(arrays, beside(path, ".safetensors"))
    unfinished = beside(path, ".json.part")
    unfinished.write_text(json.dumps(dict(outcome.numbers), indent=1) + "\n")
    unfinished.replace(beside(path, ".json"))


def read(path: Path) -> Outcome:
    """What :func:`write` was given."""
    numbers = json.loads(beside(path, ".json").read_text())
    file = beside(path, ".safetensors")
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
    train, test = (
        (images[begin:end], labels[begin:end]) for begin, end in ((0, first), (first, last))
    )
    return Data(train, test, classes, WHOLE[name])
