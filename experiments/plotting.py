"""The pictures: points against a diagonal, curves over training, images in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from torch import Tensor

SIZE = (5.2, 3.8)  # inches of a panel
FEW = 10  # windows
SHOWN = 2.5  # times the largest truth that a line may reach without a logarithmic axis
FLOOR = 1e-3  # of the largest truth: what is below leaves the picture
GREY, BLACK, BLUE, RED = "0.6", "black", "#1f6fb4", "#c0392b"


def panel(title: str, width: float = SIZE[0], height: float = SIZE[1]) -> tuple[Figure, Axes]:
    """An empty panel with its title."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def scatter(axes: Axes, true: Tensor, estimates: Mapping[str, Tensor], what: str) -> None:
    """Estimates against the truth, with the diagonal."""
    looks = (("s", 22, BLUE), ("o", 34, RED))
    for (name, values), (marker, size, colour) in zip(estimates.items(), looks, strict=False):
        axes.scatter(
            true, values, s=size, marker=marker, label=name, edgecolors=colour, facecolors="none"
        )
    largest = float(true.max()) if len(true) else 1.0
    axes.plot([0, largest], [0, largest], color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"true {what}")
    axes.set_ylabel(f"estimated {what}")
    axes.legend(frameon=False, fontsize=8)


def curves(
    axes: Axes, steps: Sequence[float], lines: Mapping[str, Sequence[float]], x: str, y: str
) -> None:
    """Lines over a common axis; the first one is the truth, in grey."""
    colours = (GREY, BLACK, BLUE, RED, "#2e8b57", "#8e44ad")
    for place, (name, values) in enumerate(lines.items()):
        axes.plot(
            steps,
            values,
            label=name,
            color=colours[place % len(colours)],
            linewidth=2.5 if place == 0 else 1.2,
            marker=None if place == 0 else "o",
            markersize=3,
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def fit_heights(axes: Axes, lines: Mapping[str, Sequence[float]]) -> None:
    """From zero; by their logarithm where a line is far from the first one, the truth."""
    test = max(next(iter(lines.values())))
    highest = max(max(values) for values in lines.values())
    if highest <= SHOWN * test:
        axes.set_ylim(0, 1.05 * highest)
        return
    least = min(min(values) for values in lines.values())
    axes.set_yscale("log")
    axes.set_ylim(max(0.8 * least, test * FLOOR), 1.3 * highest)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Running mean over a window that shrinks at the ends; a few values stay as they are."""
    if len(values) < FEW * window:
        return list(values)
    half, found = window // 2, []
    for place in range(len(values)):
        some = values[max(0, place - half) : place + half + 1]
        found.append(float(np.mean(some)))
    return found


def picture(axes: Axes, image: Tensor, above: str = "", below: str = "") -> None:
    """An image, with words above it that begin at its left edge, and below it."""
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).squeeze(), cmap="gray")
    axes.set_title(above, fontsize=8, loc="left", pad=3)
    axes.set_xlabel(below, fontsize=7, labelpad=2)
    axes.set_xticks([])
    axes.set_yticks([])
