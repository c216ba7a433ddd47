"""The axes of the memory map: where a value lies, and what lies there."""

from __future__ import annotations

import numpy as np
import pytest

from browser import examples
from engram.report.examples import Examples
from engram.report.memory_map import Axis, map_figure, map_settings

ODDS, DECADES = Axis("e", True, 1e-5, 0.999), Axis("e", False, 1e-7, 10.0)


@pytest.mark.parametrize("axis", [ODDS, DECADES])
def test_a_place_has_its_value(axis):
    values = np.array([1e-4, 0.01, 0.3, 0.5, 0.99])
    assert axis.value(axis.place(values)) == pytest.approx(values)


def test_places_are_logarithms_of_odds_or_of_values():
    assert ODDS.place(np.array([0.5, 0.9])) == pytest.approx([0.0, np.log10(9)])
    assert DECADES.place(np.array([0.5, 10])) == pytest.approx([np.log10(0.5), 1.0])
    assert ODDS.place(np.array([0.0, 1.0])) == pytest.approx(
        [np.log10(1e-5 / (1 - 1e-5)), np.log10(0.999 / 0.001)]
    )


def test_ticks_say_what_lies_there():
    assert {round(k, 6): v for k, v in ODDS.ticks().items()}[0.0] == "50 %"
    assert {round(k, 6): v for k, v in DECADES.ticks().items()}[-2.0] == "0.01"
    assert max(map(float, (label[:-2] for label in ODDS.ticks().values()))) == 99.9


def test_an_axis_holds_all_values_and_a_margin():
    low, high = DECADES.ends(np.array([0.1, 10.0, np.nan]))
    assert low < -1 < 1 < high
    assert DECADES.ends(np.array([np.nan])) == (-1.0, 1.0)
    low, high = DECADES.ends(np.array([3.0]))
    assert low < np.log10(3) < high


def test_what_the_map_shows_depends_on_what_is_known():
    found = examples(50)
    assert [a["column"] for a in map_settings(found)["axes"]] == [
        *("prediction_error", "prediction_variance")
    ]
    losses = Examples([0, 1], [0.1, 0.2], [0.3, 0.4])
    assert [a["column"] for a in map_settings(losses)["axes"]] == ["loss", "loo_loss"]
    scores = Examples([0, 1], [np.nan] * 2, [0.3, 0.4], [0.1, 0.2])
    assert [a["column"] for a in map_settings(scores)["axes"]] == ["loo_loss", "score"]
    for some in (found, losses, scores):
        assert map_figure(some).xaxis[0].axis_label


def test_lines_of_equal_score_are_where_the_product_is():
    found = examples(50)
    plot = map_figure(found)
    x, y = (Axis.of(found, name) for name in ("prediction_error", "prediction_variance"))
    lines = [r.data_source.data for r in plot.renderers if type(r.glyph).__name__ == "Line"]
    assert len(lines) > 2
    for line in lines:
        product = x.value(np.asarray(line["x"])) * y.value(np.asarray(line["y"]))
        assert np.ptp(np.log10(product)) == pytest.approx(0, abs=1e-8)
