"""docs/results/paper.md: the paper's findings beside what came out here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.accuracies import ACCURACIES, MARGIN, accuracies
from experiments.figures import PANELS
from experiments.panel import Panel, Scale
from experiments.remarks import REMARKS

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
FOLDER = RESULTS / "paper"
Row = Mapping[str, Any]
# what the count of a scale is of, by how a panel's name begins
COUNTED = {
    "fig2": "images left out",
    "fig6": "groups left out",
    "fig4": "values of delta",
    "fig3b": "draws a look",
    "fig11": "draws a look",
    "beyond-a": "nets",
    "beyond-b": "structures",
}
# trainings whose estimates the paper sets side by side: a name, then panel and estimate by column
BESIDE = (
    (
        "iBLR, a diagonal and Kronecker factors",
        ("iBLR", "diagonal", "K-FAC"),
        {
            name: tuple(
                (f"{figure}{letter}", estimate)
                for letter, estimate in zip(
                    "abc", ("optimizer", "diagonal", "kronecker"), strict=True
                )
            )
            for name, figure in (
                ("LeNet5, Fashion-MNIST", "fig5"),
                ("MLP, MNIST", "fig8-mnist-mlp-"),
                ("LeNet5, MNIST", "fig8-mnist-lenet5-"),
                ("CNN, CIFAR-10", "fig8-cifar-cnn-"),
            )
        },
    ),
    (
        "Adam's own variance by batch size",
        ("batches of 8", "batches of 32"),
        {
            name: tuple((f"fig10-{net}-{size}", "optimizer") for size in (8, 32))
            for name, net in (
                ("MLP, MNIST", "mnist-mlp"),
                ("LeNet5, MNIST", "mnist-lenet5"),
                ("LeNet5, Fashion-MNIST", "fmnist-lenet5"),
                ("CNN, CIFAR-10", "cifar-cnn"),
            )
        },
    ),
)


def page(folder: Path = FOLDER, target: Path | None = None) -> Path:
    """Write the page from the outcomes in a folder; its path."""
    found = {
        name: json.loads(path.read_text())
        for name in PANELS
        if (path := folder / f"{name}.json").is_file()
    }
    parts = [_head(), _counts(found), _table(found), *_beside(found)]
    parts += [_part(PANELS[name], row) for name, row in found.items()]
    missing = [name for name in PANELS if name not in found]
    if missing:
        named = ", ".join(f"`{name}`" for name in missing)
        parts.append(
            "## Not run yet\n\nWritten, and not yet run at this scale, or not with settings by "
            "which anything can be said (the smallest one of most is run by the tests): "
            f"{named}."
        )
    path = target or RESULTS / "paper.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _head() -> str:
    return (
        "# The paper's figures, made again\n\n"
        "Each panel with one command, `python -m experiments run NAME --scale cpu`, on a processor "
        "with two cores; `--scale paper` has the paper's own sizes. At the small scale there are "
        "fewer images, epochs and trainings again; delta stands beside a sum of losses and goes "
        "with their number, so that delta / N is the paper's. Rates are larger where there are "
        "fewer steps: those of training again such that their sum over all steps is the paper's, "
        "as long as they are not above 0.1. Images are standardised by channel, which the paper "
        "does not mention; without that its rates leave its nets several per cent below its "
        "accuracies. Test losses are of 10,000 test images (CIFAR-10: of 2,000), estimates of "
        "training images alone. Every verdict is told by the criterion beside it; a net more than "
        f"{MARGIN:.0f} points below the paper's accuracy is not judged by. One seed each. Written "
        "by `python -m experiments page`."
    )


def _counts(found: Mapping[str, Row]) -> str:
    """How many panels came out how."""
    counts = Counter(row["verdict"] for row in found.values())
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    count = f"{len(PANELS)} panels"
    if len(found) == len(PANELS):
        return f"Every one of the {count} has been run: {said}."
    return f"Of {count} {len(found)} have been run: {said}."


def _table(found: Mapping[str, Row]) -> str:
    lines = [
        "| panel | paper's figure | came out | paper's test accuracy | here |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for name, row in found.items():
        stated, own = ACCURACIES.get(name, ()), accuracies(row["results"])
        lines.append(
            f"| [{name}](#{name}) | {PANELS[name].figure} | {row['verdict']} "
            f"| {_percent(stated)} | {_percent(own)} |"
        )
    return "\n".join(lines)


def _percent(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.1f} %" for value in values) or "-"


def _beside(found: Mapping[str, Row]) -> Iterator[str]:
    """Tables of the estimates' mean distance from the test loss over the looks."""
    for title, columns, rows in BESIDE:
        there = {
            net: [found[name]["results"][estimate] for name, estimate in cells]
            for net, cells in rows.items()
            if all(name in found for name, _ in cells)
        }
        if not there:
            continue
        lines = [
            f"## {title}",
            "",
            "Mean distance of the estimate from the test loss over the looks; in brackets the "
            "estimate over the test loss at the last.",
            "",
            f"| net | {' | '.join(columns)} |",
            f"| --- |{' ---: |' * len(columns)}",
        ]
        for net, cells in there.items():
            texts = (
                f"{cell['mean distance']:.0%} ({cell['over the test loss at the end']:.2f})"
                for cell in cells
            )
            lines.append(f"| {net} | {' | '.join(texts)} |")
        yield "\n".join(lines)


def _part(panel: Panel, row: Row) -> str:
    lines = [
        f"## {panel.name}",
        "",
        f"{panel.title} (figure {panel.figure}).",
        "",
        f"*The paper:* {panel.finding}",
        "",
        f"*Here:* **{row['verdict']}**: {row['reason']}.",
        "",
        f"*Criterion:* {panel.criterion}.",
        "",
    ]
    if panel.name in REMARKS:
        lines += [REMARKS[panel.name], ""]
    lines += [
        f"![{panel.title}](paper/{panel.name}.png)",
        "",
        _settings(panel.name, row["settings"], panel.scales["paper"]),
        "",
        f"`python -m experiments run {panel.name} --scale {row['scale']}`: "
        f"{_time(row)}, seed {row['seed']}, "
        f"engram {row['versions']['engram']}, torch {row['versions']['torch']}.",
    ]
    return "\n".join(lines)


def _time(row: Row) -> str:
    """Processor time; runs from before that was kept have what the clock said."""
    if "processor_seconds" in row:
        return f"{row['processor_seconds']:,.0f} s of a busy processor"
    return f"{row['seconds']:,.0f} s"


def _counted(name: str) -> str:
    return next(words for start, words in COUNTED.items() if name.startswith(start))


def _settings(name: str, here: Row, paper: Scale) -> str:
    """What is smaller here than in the paper."""
    images = f"{here['num_train']:,}" if "num_train" in here else "all"
    words = f"*Settings:* {images} training images, {here['epochs']} epochs"
    words += f" (the paper: {f'{paper.num_train:,}' if paper.num_train else 'all'}, {paper.epochs})"
    if "batch" in here:
        words += f" in batches of {here['batch']}"
    if "hessian_start" in here:
        words += f", h0 = {here['hessian_start']:g}"
    if here.get("faster", 1.0) != 1.0:
        words += f", rates {here['faster']:g} times the paper's, up to 0.1 (iBLR: 1)"
    if here.get("again"):
        words += f"; {here['again']} epochs of training again (the paper: {paper.again})"
        if "again_batch" in here:
            words += f" in batches of {here['again_batch']}"
    if here.get("count"):
        words += f"; {here['count']} {_counted(name)} (the paper: {paper.count})"
    if "looked" in here:
        words += f"; a look goes over {here['looked']:,} training examples"
    return words + "."
