"""The charts of a page, by bokeh: described here, drawn in the browser.

A part of a chart that has a colour is tagged with what it stands for (``ink``, ``accent``, ...):
``theme.js`` paints it light or dark. Ranges are set here, so that a chart is drawn once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span, Whisker
from bokeh.plotting import figure

from engram.report.evolution import group_means
from engram.report.examples import Array
from engram.report.page import Comparison, Curves, Effect
from engram.trust.verdict import LEVELS, UNRELIABLE

Figure = Any  # bokeh's figure is typed by its properties, which mypy does not see
HEIGHT = 300  # pixels
ROW_HEIGHT = 24  # pixels of a line in a forest plot
MOST_EFFECTS = 40  # lines of a forest plot; the table beside it has all
EVOLUTIONS = 4  # lines of the evolution of scores, evenly spread over the training
SIDES = ("accent", "cool", "pale")  # colours of what hurts, of what helps, and of what may do both
GROUPS = 60  # of examples in the evolution of scores, each a point of a line


def forest_figure(effects: Sequence[Effect], unit: str) -> Figure:
    """The change of a loss by leaving each class or group out, with intervals.

    What hurts has a colour where its whole interval does and the estimate is not unreliable; what
    helps likewise.
    """
    ordered = sorted(effects, key=lambda effect: -abs(effect.change))[:MOST_EFFECTS]
    ordered = sorted(ordered, key=lambda effect: effect.change)
    names = unique_names([effect.name for effect in ordered])
    low = [effect.change if effect.low is None else effect.low for effect in ordered]
    high = [effect.change if effect.high is None else effect.high for effect in ordered]
    change = [effect.change for effect in ordered]
    kinds = list(map(_side, ordered, low, high))
    plot = base_figure(
        70 + ROW_HEIGHT * len(names),
        y_range=FactorRange(factors=names),
        x_range=_room(low + high + [0]),
    )
    plot.add_layout(Span(location=0, dimension="height", line_width=1, tags=["pale"]))
    for role in SIDES:
        own = [place for place, kind in enumerate(kinds) if kind == role]
        if not own:
            continue
        columns: dict[str, Sequence[Any]] = {"x": change, "y": names, "low": low, "high": high}
        source = ColumnDataSource({k: [v[place] for place in own] for k, v in columns.items()})
        plot.add_layout(
            Whisker(
                base="y", upper="high", lower="low", dimension="width", source=source,
                line_width=1.6, upper_head=None, lower_head=None, tags=[role],
            )
        )  # fmt: skip
        plot.scatter("x", "y", source=source, size=9, marker="circle", tags=[role, "solid"])
    plot.xaxis.axis_label = f"change of the loss, {unit} per example"
    plot.ygrid.grid_line_color = None
    return plot


def _side(effect: Effect, low: float, high: float) -> str:
    """The colour of an effect: that of no side where it is unreliable, or 0 in its interval."""
    if effect.level == LEVELS[UNRELIABLE]:
        return SIDES[2]
    return SIDES[0] if high < 0 else SIDES[1] if low > 0 else SIDES[2]


def unique_names(names: Sequence[str]) -> list[str]:
    """Names that differ: a factor of an axis stands there once."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def loss_figure(curves: Curves, unit: str) -> Figure:
    """Training loss, estimate and validation loss over the steps, with their bands."""
    lines = {
        "training": (curves.train, None, None, "pale", "solid"),
        "leave-one-out": (curves.loo, curves.loo_low, curves.loo_high, "ink", "solid"),
        "validation": (
            curves.validation, curves.validation_low, curves.validation_high, "accent", "dashed",
        ),
    }  # fmt: skip
    lines = {name: line for name, line in lines.items() if _known(line[0])}
    everything = [part for line in lines.values() for part in line[:3] if part is not None]
    plot = base_figure(HEIGHT, y_range=_room(np.concatenate(everything)))
    for name, (values, low, high, role, dash) in lines.items():
        if _known(low) and _known(high):
            plot.varea(curves.steps, low, high, fill_alpha=0.16, tags=[role, "band"])
        plot.line(
            curves.steps, values, line_width=2.2, line_dash=dash, legend_label=name, tags=[role]
        )
        plot.scatter(curves.steps, values, size=4, tags=[role, "solid"])
    if curves.stop is not None:
        plot.add_layout(
            Span(location=curves.stop, dimension="height", line_dash="dotted", tags=["accent"])
        )
    return _labelled(plot, curves.step_name, f"{unit} per example")


def evolution_figure(curves: Curves) -> Figure:
    """Mean score of groups of examples, sorted by the last update, at several updates."""
    scores = np.asarray(curves.scores, dtype=np.float64)
    known = [row for row, found in enumerate(scores) if np.isfinite(found).any()]
    spread = np.linspace(0, len(known) - 1, EVOLUTIONS).round().astype(int)
    rows = [known[place] for place in np.unique(spread)]
    plot = base_figure(HEIGHT)
    for number, means in enumerate(group_means(scores, rows, GROUPS)):
        strength = 0.25 + 0.75 * (number + 1) / len(rows)
        plot.line(
            np.linspace(0, 100, len(means)),
            means,
            line_width=2,
            line_alpha=strength,
            legend_label=f"{curves.step_name} {curves.steps[rows[number]]}",
            tags=["cool"],
        )
    return _labelled(plot, "examples, % from least to most sensitive at the end", "mean score")


def leverage_figure(curves: Curves) -> Figure:
    """Median of the leverages over the steps, with bands of 50 and 90 % of the examples."""
    quantiles = np.asarray(curves.leverage, dtype=np.float64)
    plot = base_figure(HEIGHT, y_range=_room(np.append(quantiles.ravel(), 0)))
    for low, high, alpha in ((0, 4, 0.12), (1, 3, 0.2)):
        plot.varea(
            curves.steps,
            quantiles[:, low],
            quantiles[:, high],
            fill_alpha=alpha,
            tags=["cool", "band"],
        )
    plot.line(curves.steps, quantiles[:, 2], line_width=2, tags=["cool"], legend_label="median")
    plot.add_layout(Span(location=1, dimension="width", line_dash="dotted", tags=["accent"]))
    return _labelled(plot, curves.step_name, "leverage")


def calibration_figure(bins: dict[str, tuple[Array, Array, Array]]) -> Figure:
    """How often a prediction is right against how sure it was, in bins.

    Args:
        bins: for training and leave-one-out, the mean confidence, accuracy and share of each bin.
    """
    plot = base_figure(
        HEIGHT, x_range=Range1d(start=0, end=1.02), y_range=Range1d(start=0, end=1.02)
    )
    plot.line([0, 1], [0, 1], line_dash="dashed", tags=["pale"])
    for (name, (confidence, accuracy, share)), role in zip(
        bins.items(), ("pale", "ink"), strict=True
    ):
        plot.line(confidence, accuracy, line_width=2, legend_label=name, tags=[role])
        size = 4 + 14 * np.sqrt(share / share.max())
        plot.scatter(confidence, accuracy, size=size, fill_alpha=0.85, tags=[role, "solid"])
    for axis in (plot.xaxis, plot.yaxis):
        axis.formatter = NumeralTickFormatter(format="0 %")
    return _labelled(plot, "how sure the prediction is", "how often it is right")


def comparison_figure(comparison: Comparison) -> Figure:
    """Estimated against retrained, with the line on which they agree."""
    x, y = (np.asarray(v, dtype=np.float64) for v in (comparison.estimated, comparison.retrained))
    both = np.concatenate([x, y])
    plot = base_figure(HEIGHT, x_range=_room(both), y_range=_room(both))
    ends = [float(both.min()), float(both.max())]
    if comparison.noise is not None:
        noise = comparison.noise
        plot.varea(
            ends, [e - noise for e in ends], [e + noise for e in ends],
            fill_alpha=0.18, tags=["pale", "band"],
        )  # fmt: skip
    plot.line(ends, ends, line_dash="dashed", tags=["pale"])
    plot.scatter(x, y, size=8, fill_alpha=0.75, tags=["ink", "solid"])
    return _labelled(plot, f"estimated {comparison.name}", f"retrained {comparison.name}")


def base_figure(height: int, **settings: Any) -> Figure:
    """A figure as wide as the page has room for, without what bokeh adds to it."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=14,
        **settings,
    )
    plot.axis.minor_tick_line_color = None
    plot.axis.major_tick_line_color = None
    plot.axis.axis_label_text_font_style = "normal"
    return plot


def _labelled(plot: Figure, x: str, y: str) -> Figure:
    plot.xaxis.axis_label, plot.yaxis.axis_label = x, y
    if plot.legend:
        plot.legend.update(
            orientation="horizontal",
            background_fill_alpha=0,
            border_line_color=None,
            margin=0,
            padding=4,
            spacing=14,
        )
        plot.add_layout(plot.legend[0], "above")  # where no line can be
    return plot


def _room(values: Any, margin: float = 0.08) -> Range1d:
    """A range around all values."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    reach = margin * (high - low) or 0.5
    return Range1d(start=low - reach, end=high + reach)


def _known(values: Any) -> bool:
    return values is not None and bool(np.isfinite(np.asarray(values, dtype=np.float64)).any())
