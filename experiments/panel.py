"""What an experiment is: a panel of a figure, its settings, its scales, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

SCALES = ("smoke", "cpu", "paper")
LARGE = ("cnn", "resnet20")  # nets of which the smallest scale takes fewer images


@dataclass(frozen=True)
class Scale:
    """How much of an experiment is run.

    Args:
        num_train, num_test: images; None for all.
        epochs: of training.
        count: how many are left out, tuned over or looked at, where the figure has such a number.
        again: epochs of training again; its rates are such that their sum over all steps, which is
            how far it can go, is the paper's.
        batch, again_batch: examples of a step of the first training, and of training again; fewer
            than in the paper take as many steps over fewer images.
        faster: what multiplies the learning rates of the first training, which takes fewer steps
            than the paper's.
        hessian_start: of iBLR, where fewer images want another: its variance is 1 / (N h_0) at
            first, and the paper chooses h_0 on a grid too.
        looked: training examples that a look during training goes over; None for all.
        data: another data set in place of the paper's.
    """

    num_train: int | None
    num_test: int | None
    epochs: int
    count: int = 0
    again: int = 0
    batch: int | None = None
    again_batch: int | None = None
    faster: float = 1.0
    hessian_start: float | None = None
    looked: int | None = None
    data: str | None = None


def smoke(model: str, **settings: Any) -> Scale:
    """The smallest scale: whether it runs at all, on data that scikit-learn carries."""
    images = (24, 12) if model in LARGE else (120, 60)
    return Scale(*images, data="digits", **settings)


@dataclass(frozen=True)
class Outcome:
    """What came out: numbers for the page, and arrays that the picture is drawn from."""

    numbers: Mapping[str, Any]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Args:
        name: by which it is asked for.
        figure: which one it is in the paper.
        title: what is shown.
        finding: what the paper finds in it.
        settings: the paper's.
        scales: how much of it, by name.
        criterion: when the finding counts as reproduced, and when partly.
        run: from the settings, a scale and a workplace to the outcome.
        draw: the picture of an outcome.
        held: from an outcome to whether the finding holds, with the reason.
    """

    name: str
    figure: str
    title: str
    finding: str
    criterion: str
    settings: Any
    scales: Mapping[str, Scale]
    run: Callable[[Any, Scale, Any], Outcome]
    draw: Callable[[Any, Outcome], Figure]
    held: Callable[[Outcome], tuple[str, str]]
