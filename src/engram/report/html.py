"""A page as one file of HTML that needs nothing else: no network, no folder beside it.

Templates escape everything that is put into them. What the script reads is JSON in which nothing
can end its tag, and the policy in the head lets the browser load nothing at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import bokeh
import torch
from bokeh.embed import json_item
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from engram._version import __version__
from engram.core.storage.files import write_text
from engram.report import charts, tables
from engram.report.memory_map import map_figure, map_settings
from engram.report.page import PageData
from engram.report.payload import payload, readable, safe_json
from engram.sensitivity.metrics import calibration_bins, calibration_error

SCRIPTS = (
    "data.js",
    "state.js",
    "theme.js",
    "map.js",
    "rows.js",
    "cards.js",
    "marks.js",
    "main.js",
)
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
FEWEST_SEEN = 5  # examples of a bin that is drawn: how often fewer are right is chance
CARDS = 12  # on the page at first; each click on "more" doubles them
DIGEST = 16  # characters that tell the marks of one page from those of another


def write_page(data: PageData, path: str | Path, top: int = 20) -> Path:
    """Write a page, whole; folders are made.

    Args:
        data: what stands on it.
        path: of the file.
        top: rows of the table of examples, which is there for those without a script.

    Returns:
        The path.
    """
    return write_text(path, html_of(data, top))


def html_of(data: PageData, top: int = 20) -> str:
    """The whole page as text."""
    drawn = {name: safe_json(json_item(figure)) for name, figure in _charts(data)}
    template = _templates().get_template("page.html.j2")
    return template.render(
        data=data,
        head=data.headline,
        version=__version__,
        policy=POLICY,
        style=_asset("style.css"),
        scripts=[_library(), *(_asset(name) for name in SCRIPTS)],
        payload=Markup(safe_json(payload(data.examples) | _settings(data))),
        charts_json=Markup(
            "{" + ",".join(f'"{name}":{item}' for name, item in drawn.items()) + "}"
        ),
        charts=set(drawn),
        map_text=_map_text(data),
        factors=data.examples.prediction_variance is not None,
        map_label="Every example on a map; the table of examples has the same numbers",
        table=tables.example_table(data.examples, top),
        effects=list(_effects(data)),
        confusion=tables.confusion(data.examples),
        curve_table=None if data.curves is None else tables.curve_table(data.curves),
        calibration_title="Calibration" if "chart-calibration" in drawn else "Predictions",
        calibration_text=_calibration_text(data),
        metrics=tables.metric_rows(data),
        facts=tables.facts(data),
    )


def _settings(data: PageData) -> dict[str, Any]:
    """What the script needs beside the examples."""
    examples = data.examples
    ids = "\n".join([data.headline.title, *map(str, examples.ids)])
    return {
        "cards": CARDS,
        "sort": "loo_loss" if examples.label_score is None else "label_score",
        "digest": hashlib.sha256(ids.encode("utf-8", "replace")).hexdigest()[:DIGEST],
        "map": map_settings(examples),
        "alerts": [
            {
                "flag": readable(alert.flag),
                "group": alert.group and [readable(part) for part in alert.group],
            }
            for alert in data.alerts
        ],
    }


def _charts(data: PageData) -> Iterator[tuple[str, charts.Figure]]:
    """Every chart of the page with the id of its place; the map first."""
    yield "chart-map", map_figure(data.examples)
    unit, curves = data.headline.unit, data.curves
    for number, kind in enumerate(_kinds(data)):
        chosen = [effect for effect in data.effects if effect.kind == kind]
        yield f"chart-effects-{number}", charts.forest_figure(chosen, unit)
    if curves is not None:
        yield "chart-losses", charts.loss_figure(curves, unit)
        if curves.scores is not None:
            yield "chart-evolution", charts.evolution_figure(curves)
        if curves.leverage is not None:
            yield "chart-leverage", charts.leverage_figure(curves)
    bins = _calibration(data)
    if bins:
        yield "chart-calibration", charts.calibration_figure(bins)
    for number, comparison in enumerate(data.comparisons):
        yield f"chart-comparison-{number}", charts.comparison_figure(comparison)


def _kinds(data: PageData) -> list[str]:
    return list(dict.fromkeys(effect.kind for effect in data.effects))


def _effects(data: PageData) -> Iterator[dict[str, Any]]:
    """A forest plot for each kind of group, with its table."""
    for number, kind in enumerate(_kinds(data)):
        rows = tables.effect_rows([effect for effect in data.effects if effect.kind == kind])
        label = f"What leaving out each {kind} changes"
        note = data.effect_notes.get(kind, "")
        chart = f"chart-effects-{number}"
        yield {"name": kind, "chart": chart, "label": label, "rows": rows, "note": note}


def _predictions(data: PageData) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Probabilities, labels and counts of 1, with the examples and without them."""
    examples = data.examples
    sides = {"with it": examples.probabilities, "left out": examples.loo_probabilities}
    if examples.given is None or any(side is None for side in sides.values()):
        return {}
    labels, counts = torch.as_tensor(examples.given), torch.ones(len(examples))
    return {name: (torch.as_tensor(side), labels, counts) for name, side in sides.items()}


def _calibration(data: PageData) -> dict[str, tuple[Any, Any, Any]]:
    """Mean confidence, accuracy and share of each bin that has enough examples to be seen."""
    found = {}
    for name, (probabilities, labels, counts) in _predictions(data).items():
        known = ~probabilities.isnan().any(1)
        bins = calibration_bins(probabilities[known], labels[known], counts[known])
        fewest = min(FEWEST_SEEN, float(bins[0].max()))
        size, sure, right = (column.numpy()[bins[0].numpy() >= fewest] for column in bins)
        found[name] = (sure / size, right / size, size / size.sum())
    return found


def _calibration_text(data: PageData) -> str:
    errors = {name: calibration_error(*side) for name, side in _predictions(data).items()}
    if not errors:
        return ""
    with_it, without = errors["with it"], errors["left out"]
    return (
        "Of predictions that are 80 % sure, 80 % should be right. The mean distance from that is "
        f"{100 * without:.1f} points for examples left out, as for unseen data, and "
        f"{100 * with_it:.1f} on the training data itself."
    )


def _map_text(data: PageData) -> str:
    if data.examples.prediction_variance is None:
        return "Every example by its losses; draw around some to see them below."
    return (
        "Across: how wrong the model would be about an example it had not seen. Up: how much of "
        "that it takes back by having seen it. The model's memory is at the upper right, known by "
        "heart and by nothing else; along each dotted line examples count alike."
    )


@cache
def _templates() -> Environment:
    """The package's templates: everything that is put into one is escaped."""
    environment = Environment(
        loader=PackageLoader("engram.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalised,
    )
    environment.filters |= {"number": tables.number, "share": _share}
    return environment


def _share(value: float, name: str) -> Markup:
    """An accuracy whose sign stays on its line: of plain words what is invisible is replaced."""
    return escape(tables.share(value, name))


def _finalised(value: object) -> object:
    """Words with what is invisible written out; numbers, and what is HTML already, as they are."""
    return readable(value, 10**6) if type(value) is str else value


@cache
def _asset(name: str) -> Markup:
    """A script or style sheet of the package."""
    return Markup((files("engram.report") / "assets" / name).read_text(encoding="utf-8"))


@cache
def _library() -> Markup:
    """The script of bokeh, as its package has it."""
    folder = Path(bokeh.__file__).parent / "server" / "static" / "js"
    return Markup((folder / "bokeh.min.js").read_text(encoding="utf-8"))
