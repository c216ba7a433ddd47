"""Charts and tables hold the numbers that they were given."""

from __future__ import annotations

import importlib.resources
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from browser import examples, page_data
from engram.report import charts, tables
from engram.report.html import SCRIPTS
from engram.report.page import Comparison, Curves, Effect
from engram.sensitivity.metrics import BINS, calibration_bins

ASSETS = Path(str(importlib.resources.files("engram.report")))


def drawn(plot, kind):
    return [r.data_source.data for r in plot.renderers if type(r.glyph).__name__ == kind]


def test_a_forest_has_helpers_above_and_hurters_below():
    effects = [
        Effect("a", "class", 3, 0.2, 0.1, 0.4),
        Effect("b", "class", 3, -0.1),
        Effect("a", "class", 3, 0.3),
        Effect("c", "class", 3, -0.05, -0.2, 0.1),
        Effect("d", "class", 3, 0.4, 0.3, 0.5, "unreliable"),
    ]
    plot = charts.forest_figure(effects, "nats")
    assert plot.y_range.factors == ["b", "c", "a", "a (2)", "d"]
    hurts, helps, either = drawn(plot, "Scatter")
    assert (list(hurts["y"]), list(helps["y"])) == (["b"], ["a", "a (2)"])
    assert list(either["y"]) == ["c", "d"]
    assert list(helps["low"]) == [0.1, 0.3]  # without an interval there is a point
    many = [Effect(str(k), "class", 1, float(k)) for k in range(100)]
    assert len(charts.forest_figure(many, "nats").y_range.factors) == charts.MOST_EFFECTS


def test_losses_that_are_not_known_are_no_line():
    curves = Curves([1, 2], [0.5, 0.4], [0.6, 0.7], validation=[np.nan, np.nan])
    assert len(drawn(charts.loss_figure(curves, "nats"), "Line")) == 2
    banded = Curves([1, 2], [0.5, 0.4], [0.6, 0.7], loo_low=[0.5, 0.6], loo_high=[0.7, 0.8])
    assert len(drawn(charts.loss_figure(banded, "nats"), "VArea")) == 1


def test_scores_evolve_in_the_order_of_the_last_update():
    scores = np.array([[3.0, 1.0, 2.0], [np.nan] * 3, [0.1, 0.3, 0.2]])
    lines = drawn(
        charts.evolution_figure(Curves([1, 2, 3], [1] * 3, [1] * 3, scores=scores)), "Line"
    )
    assert [list(line["y"]) for line in lines] == [[3.0, 2.0, 1.0], pytest.approx([0.1, 0.2, 0.3])]


def test_estimated_against_retrained():
    plot = charts.comparison_figure(Comparison("score", [0.1, 0.2], [0.15, 0.4], noise=0.05))
    points = drawn(plot, "Scatter")[0]
    assert (list(points["x"]), list(points["y"])) == ([0.1, 0.2], [0.15, 0.4])
    assert plot.x_range.start == plot.y_range.start


def test_bins_of_calibration_by_a_loop():
    torch.manual_seed(0)
    shares, labels = torch.rand(200, 3).softmax(1), torch.randint(0, 3, (200,))
    counts = torch.randint(0, 3, (200,)).double()
    size, sure, right = calibration_bins(shares, labels, counts)
    expected = torch.zeros(3, BINS, dtype=torch.float64)
    for p, label, count in zip(shares.double(), labels, counts, strict=True):
        place = next(k for k in range(BINS) if p.max() <= (k + 1) / BINS)
        expected[:, place] += count * torch.tensor([1.0, p.max(), float(p.argmax() == label)])
    assert torch.allclose(torch.stack([size, sure, right]), expected)


def test_the_confusion_counts():
    found = examples(200)
    matrix = tables.confusion(found)["matrix"]
    for given in range(3):
        for predicted in range(3):
            both = (found.given == given) & (found.predicted == predicted)
            assert matrix[given][predicted]["count"] == int(both.sum())
            assert 0 <= matrix[given][predicted]["shade"] <= 100


def test_many_classes_are_confused_in_pairs():
    classes, count = [f"c{k}" for k in range(60)], 600
    given = np.arange(count) % 60
    predicted = np.where(given == 5, 7, given)
    found = examples(
        count, classes=classes, given=given, predicted=predicted, probabilities=None,
        loo_probabilities=None,
    )  # fmt: skip
    assert tables.confusion(found)["pairs"] == [{"given": 5, "predicted": 7, "count": 10}]


def test_tables_say_what_charts_show():
    data = page_data(examples(30))
    table = tables.example_table(data.examples, 3)
    worst = np.argsort(-data.examples.loo_loss)[0]
    assert table.rows[0][0] == f"picture-{worst}.png"
    assert tables.curve_table(data.curves).rows[0] == ["1", "1.000", "1.050", "1.050"]
    assert [row[0] for row in tables.effect_rows(data.effects)] == ["cat", "dog", "camera 0"]


def test_what_a_page_is_made_of_is_in_the_package():
    """Whatever git does not ignore below src/engram is in the wheel."""
    files = [*(ASSETS / "assets").iterdir(), *(ASSETS / "templates").iterdir()]
    names = {path.name for path in files}
    assert {*SCRIPTS, "style.css", "page.html.j2", "parts.html.j2"} == names
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        ignored = subprocess.run(["git", "check-ignore", *map(str, files)], cwd=root, check=False)
        assert ignored.returncode == 1
