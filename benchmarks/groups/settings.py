"""The nets and the groups that are left out of their training data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.practical import nets
from benchmarks.practical.data import Split, fashion, uniform
from benchmarks.practical.loop import Setting, cosine
from benchmarks.practical.settings import adamw, sgd

CLASSES = {"trousers": 1, "shirts": 6, "boots": 9}  # one that stands alone, two like others
FEW = 30  # wrong labels that are left out by themselves


@dataclass(frozen=True)
class Source:
    """A part of the training data that came from somewhere else.

    Args:
        count: examples in all.
        size: of the source; its examples are the first.
        wrong: of them with a wrong label.
        skipped: images of the data set that other benchmarks have used.
    """

    count: int
    size: int
    wrong: int
    skipped: int = 3000

    def split(self) -> Split:
        """The data; the wrong labels come first."""
        whole = fashion(self.skipped + self.count, None)
        right = whole.given[self.skipped :]
        given = right.clone()
        generator = torch.Generator().manual_seed(1)
        given[: self.wrong] = uniform(right[: self.wrong], generator)
        return replace(whole, inputs=whole.inputs[self.skipped :], given=given, right=right)

    def groups(self) -> dict[str, Tensor]:
        """Positions of every group that is left out, by name."""
        generator = torch.Generator().manual_seed(2)
        order = torch.randperm(self.size, generator=generator)
        given = self.split().given
        found = {
            "source": torch.arange(self.size),
            "half of it": order[: self.size // 2].sort().values,
            f"{FEW} wrong labels": torch.arange(FEW),
        }
        return found | {name: (given == c).nonzero()[:, 0] for name, c in CLASSES.items()}


@dataclass(frozen=True)
class Case:
    """A setting with its source."""

    source: Source
    setting: Setting


def _case(source: Source, **settings: object) -> Case:
    return Case(source, Setting(split=source.split, **settings))  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    "adamw": _case(
        Source(3000, 300, 300),
        net=partial(nets.fashion_cnn, 0.3),
        optimizer=adamw(2e-3, 1e-2),
        epochs=12,
    ),
    "sgd": _case(
        Source(3000, 600, 300),
        net=partial(nets.fashion_cnn, 0.3),
        optimizer=sgd(0.05, 5e-4),
        epochs=12,
        schedule=cosine,
    ),
    "large source": _case(
        Source(10_000, 1000, 1000),
        net=partial(nets.fashion_cnn, 0.3),
        optimizer=adamw(2e-3, 1e-2),
        epochs=10,
    ),
    "no dropout": _case(
        Source(3000, 1000, 300),
        net=partial(nets.fashion_cnn, 0.0),
        optimizer=sgd(0.05, 5e-4),
        epochs=20,
        schedule=cosine,
    ),
}
