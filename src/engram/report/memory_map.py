r"""The memory map: every example by prediction error and prediction variance, its score as colour.

A sensitivity is the product of the two, so examples that move alike lie on a falling line. Shares
are shown by their odds, log p / (1 - p), which opens both ends: what is hardly wrong, and what is
wrong for certain. The map is described here; ``map.js`` fills it, filters it and listens to it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    BooleanFilter,
    CDSView,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LassoSelectTool,
    LogColorMapper,
    NoOverlap,
    PanTool,
    Range1d,
    TapTool,
)

from engram.core.dtypes import SMALLEST_DIVISOR
from engram.report.charts import Figure, base_figure
from engram.report.examples import Array, Examples

MAP_HEIGHT = 470  # pixels
SMALL, MANY, VERY_MANY = 500, 5_000, 12_000  # examples from which marks are drawn smaller
DECADES = 7  # that an axis of logarithms spans at most: what is smaller is as good as nothing
SHARES = (1e-5, 1 - 1e-5)  # ends of an axis of odds, likewise
MOST = 0.99  # of a variance: what an example takes away beyond that is all of its error
RARE = 0.002  # share of the examples that may lie below an axis: they would stretch it for nothing
TICKS = (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.999, 0.9999, 0.99999)
MARGIN = 0.05  # of the length of an axis, at its ends
LINE_POINTS = 80  # of a line of equal score: it is not straight among odds
PALETTE = ["#d3d9de"] * 2  # of the map, until theme.js has painted it
NAMES = {
    "loss": "loss with it",
    "loo_loss": "loss without it",
    "prediction_error": "prediction error, left out",
    "prediction_variance": "prediction variance: share that is memory",
}
COLOURED = (0.05, 0.999)  # quantiles of the scores between which colours change


@dataclass(frozen=True)
class Axis:
    """An axis of the map: logarithms, or of a share the logarithm of its odds; to the base 10.

    Attributes:
        column: of the examples.
        odds: whether it is a share.
        low: values below are put here.
        high: values above are put here.
    """

    column: str
    odds: bool
    low: float
    high: float

    @classmethod
    def of(cls, examples: Examples, column: str) -> Axis:
        """The axis of a column, and where it ends."""
        values = getattr(examples, column)
        known = values[np.isfinite(values)]
        is_share = column == "prediction_variance"
        if is_share or (column == "prediction_error" and examples.classes):
            lowest = float(np.quantile(known, RARE)) if len(known) else 0.0
            low, high = (SHARES[0], MOST if is_share else SHARES[1])
            return cls(column, True, float(np.clip(lowest, low, 0.5)), high)
        top = float(known.max(initial=0.0)) or 1.0
        return cls(column, False, top * 10.0**-DECADES, top)

    def place(self, values: Array) -> Array:
        """Where values lie."""
        kept = np.clip(values, self.low, self.high)
        found: Array = np.log10(kept / (1 - kept)) if self.odds else np.log10(kept)
        return found

    def value(self, places: Array) -> Array:
        """What lies at some places."""
        powers: Array = 10.0**places
        return powers / (1 + powers) if self.odds else powers

    def ends(self, values: Array) -> tuple[float, float]:
        """The range around some values, with a margin of its length."""
        known = self.place(values[np.isfinite(values)])
        if len(known) == 0:
            return -1.0, 1.0
        low, high = float(known.min()), float(known.max())
        reach = MARGIN * (high - low) or 0.5
        return low - reach, high + reach

    def ticks(self) -> dict[float, str]:
        """Where there is a tick, and what it says."""
        if self.odds:
            inside = [value for value in TICKS if self.low <= value <= self.high]
            return {float(self.place(np.array(v))): f"{100 * v:g} %" for v in inside}
        top = math.ceil(math.log10(self.high))
        values = [m * 10.0**k for k in range(top - DECADES, top + 1) for m in (1, 2, 5)]
        return {math.log10(value): f"{value:g}" for value in values}


def map_figure(examples: Examples) -> Figure:
    """Every example by error and variance; the script puts the points into it."""
    axes = _axes(examples)
    (left, right), (bottom, top) = (axis.ends(getattr(examples, axis.column)) for axis in axes)
    plot = base_figure(
        MAP_HEIGHT,
        tags=["card"],
        x_range=Range1d(start=left, end=right, name="x"),
        y_range=Range1d(start=bottom, end=top, name="y"),
    )
    for shown, axis in zip((plot.xaxis[0], plot.yaxis[0]), axes, strict=True):
        shown.ticker = FixedTicker(ticks=list(axis.ticks()))
        shown.major_label_overrides = axis.ticks()
        shown.major_label_policy = NoOverlap()
    plot.xgrid.ticker, plot.ygrid.ticker = plot.xaxis[0].ticker, plot.yaxis[0].ticker
    _lines_of_equal_score(plot, axes, (left, right))
    points = _points(plot, examples)
    plot.add_tools(
        HoverTool(tooltips=None, renderers=[points], name="hover"),
        LassoSelectTool(renderers=[points], continuous=False, name="select"),
        PanTool(name="move"),
        TapTool(renderers=[points]),
    )
    plot.toolbar.active_drag = plot.select_one({"name": "select"})
    plot.xaxis.axis_label, plot.yaxis.axis_label = _names(examples)
    return plot


def _points(plot: Figure, examples: Examples) -> Any:
    """The points, those that are filtered out behind them, and a ring around the one looked at."""
    source = ColumnDataSource({"x": [], "y": [], "score": []}, name="points")
    ghosts = ColumnDataSource({"x": [], "y": []}, name="ghosts")
    focus = ColumnDataSource({"x": [], "y": []}, name="focus")
    marker, size = _mark(len(examples))
    look = {"marker": marker, "size": size, "line_color": None}
    plot.scatter("x", "y", source=ghosts, fill_color="#8a929b", fill_alpha=0.13, **look)
    colour = {"field": "score", "transform": _score_colours(examples)}
    points = plot.scatter(
        "x",
        "y",
        source=source,
        view=CDSView(filter=BooleanFilter(booleans=None, name="filter")),
        fill_color=colour,
        fill_alpha=0.9,
        nonselection_fill_alpha=0.07,
        selection_fill_alpha=1.0,
        name="map points",
        **look,
    )
    plot.scatter(
        "x",
        "y",
        source=focus,
        size=size + 11,
        fill_alpha=0,
        line_width=2,
        tags=["ink"],
        marker="circle",
    )
    return points


def _lines_of_equal_score(
    plot: Figure, axes: tuple[Axis, Axis], across: tuple[float, float]
) -> None:
    """A dotted line for each decade of the product of the two, where they are factors."""
    x, y = axes
    if not y.odds:
        return
    places = np.linspace(*across, LINE_POINTS)
    values = x.value(places)
    for decade in range(math.floor(math.log10(y.low)), math.ceil(math.log10(values.max())) + 1):
        share = 10.0**decade / values
        inside = (share > y.low) & (share < y.high)
        if inside.any():
            look = {"line_dash": "dotted", "line_alpha": 0.6, "tags": ["pale"]}
            plot.line(places[inside], y.place(share[inside]), **look)


def map_settings(examples: Examples) -> dict[str, Any]:
    """What the script needs to fill the map: the two axes, and the ends of the colours."""
    colours = _score_colours(examples)
    axes = [asdict(axis) for axis in _axes(examples)]
    return {"axes": axes, "low": colours.low, "high": colours.high}


def _names(examples: Examples) -> tuple[str, str]:
    """What the two axes are called."""
    x, y = (NAMES.get(axis.column, axis.column.replace("_", " ")) for axis in _axes(examples))
    return x, y


def _axes(examples: Examples) -> tuple[Axis, Axis]:
    """Along x and y: the factors of the sensitivity, or what else is known."""
    names = "loss", "loo_loss"
    if examples.prediction_error is not None and examples.prediction_variance is not None:
        names = "prediction_error", "prediction_variance"
    elif np.isnan(examples.loss).all() and examples.score is not None:
        names = "loo_loss", "score"
    return Axis.of(examples, names[0]), Axis.of(examples, names[1])


def _mark(count: int) -> tuple[str, int]:
    """Marker and size by how many there are; squares are drawn several times faster."""
    if count > VERY_MANY:
        return "square", 3
    return "circle", 9 if count <= SMALL else 6 if count <= MANY else 5


def _score_colours(examples: Examples) -> LogColorMapper:
    known = np.zeros(0) if examples.score is None else examples.score
    known = known[np.isfinite(known) & (known > 0)]
    low, high = np.quantile(known, COLOURED) if len(known) else (0.1, 1.0)
    low = max(float(low), float(high) * 1e-4, SMALLEST_DIVISOR)
    return LogColorMapper(
        palette=PALETTE, low=low, high=max(float(high), 2 * low), name="score colours"
    )
