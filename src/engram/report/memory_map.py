r"""The memory map: every example by prediction error and prediction variance, its score as colour.

A sensitivity is the product of the two, so on axes of logarithms examples that move alike lie on a
falling line. The map is described here; ``map.js`` fills it, filters it and listens to it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from bokeh.models import (
    BooleanFilter,
    CDSView,
    ColumnDataSource,
    HoverTool,
    LassoSelectTool,
    LogColorMapper,
    PanTool,
    Range1d,
    TapTool,
)

from engram.core.dtypes import SMALLEST_DIVISOR
from engram.report.charts import Figure, base_figure
from engram.report.page import Array, Examples

MAP_HEIGHT = 470  # pixels
SMALL, MANY, VERY_MANY = 500, 5_000, 12_000  # examples from which marks are drawn smaller
DECADES = 7  # that an axis of the map spans at most: what is smaller is as good as nothing
PALETTE = ["#d3d9de"] * 2  # of the map, until theme.js has painted it
COLOURED = (0.05, 0.999)  # quantiles of the scores between which colours change


def map_figure(examples: Examples) -> Figure:
    """Every example by error and variance; the script puts the points into it."""
    columns = [getattr(examples, name) for name in _axes(examples)]
    across, up = (_span(np.maximum(column, _floor(column))) for column in columns)
    plot = base_figure(
        MAP_HEIGHT,
        x_axis_type="log",
        y_axis_type="log",
        x_range=Range1d(start=across[0], end=across[1], name="x"),
        y_range=Range1d(start=up[0], end=up[1], name="y"),
    )
    source = ColumnDataSource({"x": [], "y": [], "score": []}, name="points")
    ghosts = ColumnDataSource({"x": [], "y": []}, name="ghosts")
    focus = ColumnDataSource({"x": [], "y": []}, name="focus")
    marker, size = _mark(len(examples))
    look = {"marker": marker, "size": size, "line_color": None}
    plot.scatter("x", "y", source=ghosts, fill_color="#8a929b", fill_alpha=0.18, **look)
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
    plot.add_tools(
        HoverTool(tooltips=None, renderers=[points], name="hover"),
        LassoSelectTool(renderers=[points], continuous=False, name="select"),
        PanTool(name="move"),
        TapTool(renderers=[points]),
    )
    plot.toolbar.active_drag = plot.select_one({"name": "select"})
    plot.xaxis.axis_label, plot.yaxis.axis_label = map_names(examples)
    return plot


def map_settings(examples: Examples) -> dict[str, Any]:
    """What the script needs to fill the map: the two columns, their floors, the ends of colour."""
    names = _axes(examples)
    colours = _score_colours(examples)
    return {
        "x": names[0],
        "y": names[1],
        "floor": [_floor(getattr(examples, name)) for name in names],
        "low": colours.low,
        "high": colours.high,
    }


def map_names(examples: Examples) -> tuple[str, str]:
    """What the two axes are called."""
    words = {"loss": "loss with it", "loo_loss": "loss without it"}
    x, y = (words.get(name, name.replace("_", " ")) for name in _axes(examples))
    return x, y


def _axes(examples: Examples) -> tuple[str, str]:
    """Columns along x and y: the factors of the sensitivity, or what else is known."""
    if examples.prediction_error is not None and examples.prediction_variance is not None:
        return "prediction_error", "prediction_variance"
    if np.isnan(examples.loss).all() and examples.score is not None:
        return "loo_loss", "score"
    return "loss", "loo_loss"


def _floor(column: Array) -> float:
    """The end of the decades shown: what is below is put there."""
    known = column[np.isfinite(column)]
    return (float(known.max(initial=0.0)) or 1.0) * 10.0**-DECADES


def _span(column: Array, margin: float = 0.06) -> tuple[float, float]:
    """The range of an axis of logarithms around the values, with a margin of its length."""
    known = column[np.isfinite(column) & (column > 0)]
    if len(known) == 0:
        return 0.1, 1.0
    low, high = math.log10(float(known.min())), math.log10(float(known.max()))
    reach = margin * (high - low) or 0.5
    return 10 ** (low - reach), 10 ** (high + reach)


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
