"""The pages of a result and of a training, as text."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import engram
from engram.errors import DataError
from engram.report.tables import number
from engram.report.training_page import history_curves
from engram.tracking.history import Record
from streamed import NUM_DATA, backward, batches, build, data


class Parsed(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids.add(dict(attrs).get("id") or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def tracked(updates: int = 3) -> engram.Tracker:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), validation=data())
    for step in range(updates):
        optimizer.zero_grad()
        backward(model, torch.arange(NUM_DATA))
        optimizer.step()
        tracker.update(step=step)
    return tracker


def test_the_page_of_a_run_stands_alone(tmp_path: Path) -> None:
    tracker = tracked()
    path = tracker.report(tmp_path / "deep" / "training.html", top=4)
    assert path.read_text().startswith("<!DOCTYPE html>")
    page = Parsed(path.read_text())
    links = {tag: attributes for tag, attributes in page.tags if tag in ("link", "iframe", "img")}
    assert links == {"link": {"rel": "icon", "href": "data:,"}}
    assert not any("src" in attributes for tag, attributes in page.tags if tag == "script")
    best = tracker.history.best
    assert best is not None
    assert f"{best.estimate:.4f}" in page.text
    for place in ("chart-map", "chart-losses", "chart-evolution", "chart-leverage"):
        assert place in page.ids
    assert "1 suspect" in page.text
    result = tracker.update()
    assert result is not None
    assert page.text.index(result.verdict.level) < page.text.index("The memory map")
    assert "contradict" in page.text[: page.text.index("The memory map")]


def test_a_streamed_run_has_a_page_too(tmp_path: Path) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    for batch in batches(2):
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    tracker.history.add(Record(9, math.nan, math.nan), torch.full((NUM_DATA,), math.nan))
    page = Parsed(tracker.report(tmp_path / "training.html").read_text())
    assert "chart-losses" in page.ids
    assert "chart-leverage" not in page.ids  # no leverages while streaming
    assert "1 of 3 updates gave no finite estimate" in page.text
    with pytest.raises(DataError, match="no leverages"):
        tracker.history.leverage_figure()


def test_a_resumed_run_has_a_page_before_its_next_update(tmp_path: Path) -> None:
    tracker, again = tracked(), tracked(0)
    again.load_state_dict(tracker.state_dict())
    assert "score" in again.report(tmp_path / "training.html").read_text()


def test_a_run_without_updates_has_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one update"):
        tracked(0).report(tmp_path / "training.html")


def test_the_page_of_a_result(tmp_path: Path) -> None:
    result = tracked().update()
    assert result is not None
    page = Parsed(result.report(tmp_path / "report.html", top=3).read_text())
    assert number(result.loo_nll) in page.text
    first = str(int(result.top(1).index[0]))
    table = page.text[page.text.index("as a table") :]
    assert f"\n{first}" in table[: table.index("Classes")]
    assert "chart-calibration" in page.ids


def test_leverages_are_kept_as_quantiles() -> None:
    tracker = tracked()
    result = tracker.update()
    assert result is not None
    record = tracker.history.records[-1]
    expected = result.leverage.double().nanquantile(torch.tensor([0.05, 0.5, 0.95]).double())
    assert record.leverage[0::2] == pytest.approx(expected.tolist())
    median = tracker.history.leverage_figure().axes[0].get_lines()[0]
    assert len(median.get_xdata()) == 4


def test_a_page_says_where_the_estimate_comes_from(tmp_path: Path) -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), held_out=7)
    with tracker.twin_step(torch.arange(NUM_DATA)):
        backward(model, torch.arange(NUM_DATA))
    optimizer.step()
    tracker.update(step=1)
    text = Parsed(tracker.report(tmp_path / "page.html").read_text()).text
    assert "a second training without 7 of the examples" in text
    assert "second training" not in Parsed(tracked().report(tmp_path / "two.html").read_text()).text


def test_a_result_shows_its_verdict_before_its_figures(tmp_path: Path) -> None:
    model, _ = build()
    result = engram.sensitivities(
        model, data(), engram.laplace(model, data(), structure="diagonal", prior_precision=1.0)
    )
    text = Parsed(result.report(tmp_path / "page.html").read_text()).text
    assert text.index(result.verdict.level) < text.index("The memory map")
    for reason in result.verdict.reasons:
        assert text.index(reason.text) < text.index("The memory map")


def test_the_estimate_has_a_band() -> None:
    tracker = tracked(2)
    curves = history_curves(tracker.history)
    for row, record in enumerate(tracker.history):
        losses = tracker.history.loo_loss[row].double()
        reach = 1.96 * float(losses.std()) / math.sqrt(len(losses))
        assert curves.loo_low[row] == pytest.approx(record.estimate - reach, rel=1e-5)
        assert curves.loo_high[row] == pytest.approx(record.estimate + reach, rel=1e-5)


@pytest.mark.parametrize("median", [0.4, 30.0])
def test_the_page_says_when_leverages_are_too_large(tmp_path, median):
    tracker = tracked(2)
    tracker.history.records[-1] = replace(
        tracker.history.records[-1], leverage=(0.1, 0.2, median, 40.0, 50.0)
    )
    text = tracker.report(tmp_path / "training.html").read_text()
    assert ("do not trust the size" in text) == (median > 1)
