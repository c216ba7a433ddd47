"""One picture: the examples with suspect labels, the most and the least sensitive ones."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from torch import Tensor

import engram
from engram.core.storage.files import replacing
from engram.demo.digits import Digits

COLUMNS = 12
TITLES = (
    "highest leave-one-out loss: the labels that the other examples contradict most",
    "the next ones",
    "highest score: the predictions that hang most on the example itself",
    "lowest score: the other examples say the same",
)
WRONG, RIGHT = "#d62728", "#b0b0b0"


def draw(data: Digits, result: engram.Result, path: Path) -> None:
    """Write the picture; red marks a label that was flipped."""
    by_loss = result.loo_loss.argsort(descending=True)
    by_score = result.score.argsort(descending=True)
    rows = (
        by_loss[:COLUMNS],
        by_loss[COLUMNS : 2 * COLUMNS],
        by_score[:COLUMNS],
        by_score[-COLUMNS:],
    )
    figure = Figure(figsize=(12, 7.2))
    strips = GridSpec(len(rows), COLUMNS, figure, left=0.01, right=0.99, top=0.87, bottom=0.06)
    strips.update(hspace=0.75, wspace=0.15)
    count = int(data.flipped.sum())
    figure.suptitle(
        f"{len(data.labels):,} training digits, {count} labels flipped on purpose (red)",
        fontsize=14,
        x=0.01,
        ha="left",
    )
    for row, (title, chosen) in enumerate(zip(TITLES, rows, strict=True)):
        for column, index in enumerate(chosen.tolist()):
            axes = figure.add_subplot(strips[row, column])
            _example(axes, data, result.outputs, index)
            if column == 0:
                axes.set_title(title, loc="left", fontsize=11)
    with replacing(path) as written:
        figure.savefig(written, dpi=100, format="png")


def _example(axes: Axes, data: Digits, outputs: Tensor, index: int) -> None:
    wrong = bool(data.flipped[index])
    axes.imshow(data.inputs[index].numpy(), cmap="gray_r", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(WRONG if wrong else RIGHT)
        spine.set_linewidth(3 if wrong else 1)
    caption = f"given {int(data.labels[index])}\npredicted {int(outputs[index].argmax())}"
    axes.set_xlabel(caption, fontsize=8.5, color=WRONG if wrong else "black")
