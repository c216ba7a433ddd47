"""The demonstration as a user sees it: every step says what it does and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.color import Color
from rich.console import Console
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.demo.digits import Digits, Settings, digits, network
from engram.demo.findings import (
    ClassEffect,
    LossComparison,
    check_classes,
    compare_losses,
    draw,
    estimate_classes,
    flips_found,
    follow,
    suspects_neighbours,
    tracker_of,
)
from engram.demo.page import demo_page
from engram.report.html import write_page
from engram.sensitivity.class_removals import ClassRemovals

DRAWN = 12  # suspect examples; what follows divides it into whole rows
COLUMNS = (6, 4, 3, 2)  # of them in a row, the first that fits the terminal
EXAMPLE_WIDTH = 18  # characters of one drawn example and the gap after it
REPORTS = 10  # lines of the table that grows while the net trains; each costs a fit
SHADES = " .:-=+*#%@"  # of a pixel without colours, from black to white


def run(settings: Settings, out: Path, console: Console) -> None:
    """Train, estimate, compare and save into the folder ``out``."""
    start = time.perf_counter()
    with single_thread():
        data = digits(settings)
        tracker = _train(settings, data, console)
        model, history = tracker.model, tracker.history
        posterior, result = _sensitivities(settings, data, model, console)
        _losses(compare_losses(model, data, result, settings), settings, console)
        _suspects(data, result, console)
        _flips(data, flips_found(data, result), console)
        classes = _classes(settings, data, model, console)
        near = suspects_neighbours(model, data, posterior, result)
    out.mkdir(parents=True, exist_ok=True)
    draw(data, result, out / "demo.png")
    result.save(out)
    page = write_page(demo_page(data, result, history, *classes, near), out / "report.html")
    console.print(f"\nPicture  {out / 'demo.png'}", highlight=False, soft_wrap=True)
    console.print(f"Result   engram show {out}", highlight=False, soft_wrap=True)
    console.print(f"Time     {time.perf_counter() - start:.0f} s", highlight=False)
    console.print(f"Page     {page}", highlight=False, soft_wrap=True)


@contextmanager
def single_thread() -> Iterator[None]:
    """One thread while this lasts: layers this small only get slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _growing(table: Table, console: Console) -> Iterator[None]:
    """Show the table while rows are added; where there is no terminal, once it is complete."""
    if console.is_terminal:
        with Live(table, console=console):
            yield
    else:
        yield
        console.print(table)


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]", highlight=False)


def _train(settings: Settings, data: Digits, console: Console) -> engram.Tracker:
    model = network(settings)
    parameters = sum(p.numel() for p in model.parameters())
    _heading(
        console,
        f"1. Training on {len(data.labels):,} digits, {int(data.flipped.sum())} with a wrong label "
        f"({parameters:,} parameters)",
    )
    table = Table("epoch", "train loss", "leave-one-out", "test loss", "test accuracy")
    for column in table.columns:
        column.justify = "right"
    tracker = tracker_of(model, data, settings)
    with _growing(table, console):
        for moment in follow(tracker, data, settings, max(1, settings.epochs // REPORTS)):
            table.add_row(
                str(moment.epoch),
                f"{moment.train:.4f}",
                f"{moment.estimated:.4f}",
                f"{moment.measured:.4f}",
                f"{moment.accuracy:.1%}",
            )
    console.print(
        "Leave-one-out is the tracker's estimate of the test loss from the training data alone; "
        f"the test loss beside it has {settings.flipped_share:.0%} of its labels flipped too. "
        f"Lowest estimate at epoch {tracker.best_step}.",
        highlight=False,
    )
    return tracker


def _sensitivities(
    settings: Settings, data: Digits, model: nn.Module, console: Console
) -> tuple[engram.Posterior, engram.Result]:
    start = time.perf_counter()
    posterior = engram.laplace(
        model,
        data.train,
        structure="kronecker",
        prior_precision=settings.prior_precision,
        progress=False,
    )
    result = engram.sensitivities(model, data.train, posterior, progress=False)
    seconds = time.perf_counter() - start
    _heading(
        console,
        f"2. Each of the {result.num_data:,} left out in turn: estimated in {seconds:.2f} s",
    )
    console.print(str(result), highlight=False, soft_wrap=True)
    return posterior, result


def _losses(losses: LossComparison, settings: Settings, console: Console) -> None:
    _heading(console, "3. The test loss, estimated from the training data alone")
    table = Table("nats per example", "training loss", "leave-one-out", "test data")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(
        f"{settings.flipped_share:.0%} of labels wrong",
        f"{losses.train:.3f}",
        f"{losses.estimated:.3f}",
        f"{losses.measured:.3f}",
    )
    table.add_row(
        "right labels only",
        f"{losses.train_right:.3f}",
        f"{losses.estimated_right:.3f}",
        f"{losses.measured_right:.3f}",
    )
    console.print(table)
    console.print(
        "The test labels are right, some training labels are not: the first line gives the test "
        "loss with labels flipped at the same rate, the second leaves out the flipped training "
        "examples.",
        highlight=False,
    )


def _suspects(data: Digits, result: engram.Result, console: Console) -> None:
    _heading(console, f"4. The {DRAWN} examples whose label the others contradict most")
    chosen = result.loo_loss.argsort(descending=True)[:DRAWN].tolist()
    columns = next((n for n in COLUMNS if n * EXAMPLE_WIDTH <= console.width), 1)
    for start in range(0, len(chosen), columns):
        if start > 0:
            console.print()
        grid = Table.grid(padding=(0, 1))
        for _ in range(columns):
            grid.add_column(width=EXAMPLE_WIDTH - 2, no_wrap=True)
        row = chosen[start : start + columns]
        grid.add_row(*(_example(data, result, index, console) for index in row))
        console.print(grid)


def _example(data: Digits, result: engram.Result, index: int, console: Console) -> Text:
    wrong = bool(data.flipped[index])
    text = image(data.inputs[index], console.color_system is not None)
    text.append(f"\ngiven {int(data.labels[index])}")
    text.append(f"\npredicted {int(result.outputs[index].argmax())}")
    text.append("\nflipped" if wrong else "\nlabel is right", "bold red" if wrong else "")
    return text


def _flips(data: Digits, found: dict[str, float], console: Console) -> None:
    count = int(data.flipped.sum())
    _heading(console, f"5. How many of the {count} flipped labels are among the first {count}")
    table = Table("ranked by", "found", "precision")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, number in found.items():
        table.add_row(name, f"{number:g}", f"{number / count:.0%}")
    console.print(table)
    console.print(
        "For wrong labels rank by the leave-one-out loss; the training loss does about as well "
        "on this net. The score finds predictions that hang on a single example: wrong labels "
        "learned by heart, and digits between two classes.",
        highlight=False,
    )


def _classes(
    settings: Settings, data: Digits, model: nn.Module, console: Console
) -> tuple[ClassRemovals, list[ClassEffect]]:
    start = time.perf_counter()
    removals = estimate_classes(model, data, settings)
    seconds = time.perf_counter() - start
    _heading(console, "6. What if a whole class were left out? Change of the loss, nats")
    table = Table("class", "examples", "own: estimate", "retrained", "test: estimate", "retrained")
    for column in table.columns:
        column.justify = "right"
    start = time.perf_counter()
    effects = []
    with _growing(table, console):
        for effect in check_classes(model, data, settings, removals):
            effects.append(effect)
            table.add_row(*_class_row(effect))
    share = sum(e.own_estimated for e in effects) / sum(e.own_retrained for e in effects)
    console.print(
        f"Estimated in {seconds:.0f} s, retrained in {time.perf_counter() - start:.0f} s. A class "
        f"is a tenth of the data, a long way for one step: the estimates are {share:.0%} of the "
        "change after retraining, taken together.",
        highlight=False,
    )
    if any(effect.flagged for effect in effects):
        console.print("* The precision without the class is not positive definite.")
    return removals, effects


def _class_row(effect: ClassEffect) -> tuple[str, ...]:
    return (
        str(effect.label),
        str(effect.examples),
        f"{effect.own_estimated:+.2f}" + ("*" if effect.flagged else ""),
        f"{effect.own_retrained:+.2f}",
        f"{effect.test_estimated:+.3f}",
        f"{effect.test_retrained:+.3f}",
    )


def image(pixels: Tensor, colour: bool) -> Text:
    """An image [H, W] between 0 and 1 as text, H lines of 2 W characters.

    Args:
        pixels: the image.
        colour: whether the terminal has colours: then the image is enlarged, and one character
            shows two pixels, one above the other; otherwise two characters show one pixel.
    """
    if colour:
        enlarged = functional.interpolate(pixels[None, None], scale_factor=2, mode="bilinear")
        return _half_blocks(enlarged[0, 0])
    return _shades(pixels)


def _shades(pixels: Tensor) -> Text:
    deepest = len(SHADES) - 1
    lines = ("".join(2 * SHADES[round(v * deepest)] for v in row) for row in pixels.tolist())
    return Text("\n".join(lines))


def _half_blocks(pixels: Tensor) -> Text:
    text = Text()
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=_grey(above), bgcolor=_grey(below)))
        text.append("\n")
    text.rstrip()
    return text


def _grey(value: float) -> Color:
    level = round(255 * value)
    return Color.from_rgb(level, level, level)
