"""docs/results/paper.md: the paper's findings beside what came out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.figures import PANELS
from experiments.panel import Panel

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
FOLDER = RESULTS / "paper"
# test accuracies that the paper states, by panel, in per cent
ACCURACIES = {
    "fig2a": 98.4,
    "fig2b": 91.2,
    "fig2c": 76.7,
    "fig1b": 83.4,
    "fig5a": 90.7,
    "fig5b": 91.0,
    "fig5c": 91.0,
    "fig8-mnist-mlp-a": 95.6,
    "fig8-mnist-mlp-b": 95.8,
    "fig8-mnist-mlp-c": 95.8,
    "fig8-mnist-lenet5-a": 97.5,
    "fig8-mnist-lenet5-b": 97.4,
    "fig8-mnist-lenet5-c": 97.4,
    "fig8-cifar-cnn-a": 81.0,
    "fig8-cifar-cnn-b": 75.4,
    "fig8-cifar-cnn-c": 73.6,
    "fig9a": 88.1,
    "fig9b": 87.6,
    "fig10-mnist-mlp-8": 97.3,
    "fig10-mnist-mlp-32": 97.4,
    "fig10-mnist-lenet5-8": 99.2,
    "fig10-mnist-lenet5-32": 99.2,
    "fig10-fmnist-lenet5-8": 91.4,
    "fig10-fmnist-lenet5-32": 91.2,
    "fig10-cifar-cnn-8": 75.2,
    "fig10-cifar-cnn-32": 78.4,
    "fig11a": 91.0,
}


def page(folder: Path = FOLDER, target: Path | None = None) -> Path:
    """Write the page from the outcomes in a folder; its path."""
    found = {
        name: json.loads(path.read_text())
        for name in PANELS
        if (path := folder / f"{name}.json").is_file()
    }
    parts = [_head(found), *(_part(PANELS[name], row, folder) for name, row in found.items())]
    missing = [name for name in PANELS if name not in found]
    if missing:
        named = ", ".join(f"`{name}`" for name in missing)
        parts.append(
            "## Not run yet\n\nWritten, and not yet run at this scale (the smallest one of most is "
            f"run by the tests): {named}."
        )
    path = target or RESULTS / "paper.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _head(found: dict[str, Any]) -> str:
    lines = [
        "# The paper's figures, made again",
        "",
        "Each panel with one command, `python -m experiments run NAME --scale cpu`, on a processor "
        "with two cores; `--scale paper` has the paper's own sizes. What differs from the paper is "
        "in the scale: fewer images, fewer epochs, fewer trainings again. Written by "
        "`python -m experiments page`.",
        "",
        "| panel | paper's figure | came out | paper's accuracy | here |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for name, row in found.items():
        here = row["results"].get("test accuracy")
        if here is None and "test_error" in row["results"]:
            here = 1 - row["results"]["test_error"]
        stated = f"{ACCURACIES[name]:.1f} %" if name in ACCURACIES else "-"
        own = "-" if here is None else f"{100 * here:.1f} %"
        lines.append(
            f"| [{name}](#{name}) | {PANELS[name].figure} | {row['verdict']} | {stated} | {own} |"
        )
    return "\n".join(lines)


def _part(panel: Panel, row: dict[str, Any], folder: Path) -> str:
    scale = panel.scales[row["scale"]]
    images = f"{scale.num_train:,}" if scale.num_train else "all"
    lines = [
        f"## {panel.name}",
        "",
        f"{panel.title} (figure {panel.figure}).",
        "",
        f"*The paper:* {panel.finding}",
        "",
        f"*Here:* **{row['verdict']}**: {row['reason']}.",
        "",
        f"![{panel.title}](paper/{panel.name}.png)",
        "",
        f"{images} training images, {scale.epochs} epochs, seed {row['seed']}, "
        f"{row['seconds']:,.0f} s; engram {row['versions']['engram']}, "
        f"torch {row['versions']['torch']}. "
        f"`python -m experiments run {panel.name} --scale {row['scale']}`",
    ]
    return "\n".join(lines)
