"""The page as a person has it: in a browser, with mouse, keyboard, and nothing but the file."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from browser import Opened, examples, launched, opened, page_data, written
from engram.report.html import write_page
from engram.report.page import Alert, Effect, Examples, Headline, Making, Neighbours

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.hacked = 1'>",
    "\"><svg onload=window.hacked=1>",
    "'); window.hacked = 1; //",
    "a\u202eb\u2066c",
    "=HYPERLINK(\"http://x\")",
    "{{ 7 * 7 }} {% raw %}",
    "line\none, \u2028two\x1b[31m\x00",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def window(browser: Any, tmp_path_factory: Any) -> Iterator[tuple[Opened, Examples]]:
    """One page for most tests: loading it is what takes time."""
    path, found = written(tmp_path_factory.mktemp("page"))
    with opened(browser, path) as shown:
        yield shown, found


@pytest.fixture
def made(window: tuple[Opened, Examples]) -> tuple[Opened, Examples]:
    """The page as it was opened, and its examples."""
    shown, found = window
    shown.page.set_viewport_size({"width": 1200, "height": 900})
    shown.page.evaluate("engram.change({sort: engram.data.sort}), engram.reset(), scrollTo(0, 0)")
    return shown, found


def at(found: Any, place: int) -> tuple[float, float]:
    """Where on the screen an example lies on the map."""
    x, y = found.page.evaluate(
        """(place) => {
            const { plot } = engram.mapOf.model(), view = Bokeh.index.get_one(plot);
            const { x_scale, y_scale } = view.frame, frame = view.frame.bbox;
            const box = document.getElementById("chart-map").getBoundingClientRect();
            return [box.x + x_scale.compute(engram.mapOf.x[place]),
                    box.y + y_scale.compute(engram.mapOf.y[place])];
        }""",
        place,
    )
    return x, y


def loneliest(found: Any) -> int:
    """An example that has no other near it on the map."""
    place: int = found.page.evaluate(
        """() => {
            const [a, b] = [engram.mapOf.x, engram.mapOf.y].map((column) => Array.from(column));
            const room = a.map((_, i) => Math.min(...a.map((_, j) => i === j ? 9 :
                Math.hypot(a[i] - a[j], b[i] - b[j]))));
            return room.indexOf(Math.max(...room));
        }"""
    )
    return place


def test_everything_is_there(made):
    shown, found = made
    page = shown.page
    assert page.title() == "A title"
    assert page.locator("#sentence").inner_text() == "One sentence."
    assert page.locator(".chart canvas").count() >= 8
    assert shown.count() == len(found)
    worst = np.argsort(-found.loo_loss)[: len(shown.cards())]
    assert shown.cards() == [found.ids[i] for i in worst]
    assert page.locator(".card .thumb:not(.tiny)").count() == len(shown.cards())
    assert page.locator(".near button").count() > 0


def test_a_point_tells_what_it_is(made):
    shown, found = made
    shown.page.locator("#chart-map").scroll_into_view_if_needed()
    place = loneliest(shown)
    shown.page.mouse.move(*at(shown, place))
    shown.page.wait_for_selector("#peek:not([hidden])")
    assert found.ids[place] in shown.page.locator("#peek").inner_text()
    shown.page.mouse.move(2, 2)
    shown.page.wait_for_selector("#peek", state="hidden")


def test_what_is_lassoed_is_shown(made):
    shown, found = made
    shown.page.locator("#chart-map").scroll_into_view_if_needed()
    place = loneliest(shown)
    x, y = at(shown, place)
    mouse = shown.page.mouse
    mouse.move(x - 7, y - 7)
    mouse.down()
    for corner in ((x + 7, y - 7), (x + 7, y + 7), (x - 7, y + 7), (x - 7, y - 7)):
        mouse.move(*corner, steps=4)
    mouse.up()
    shown.until("engram.state.picked !== null")
    assert shown.cards() == [found.ids[place]]
    assert "selected on the map" in shown.page.locator("#count").inner_text()
    shown.page.keyboard.press("Escape")
    assert shown.count() == len(found)


def test_zoom_and_move(made):
    page = made[0].page
    ends = "engram.mapOf.model().ranges.map((range) => [range.start, range.end])"
    start = page.evaluate(ends)
    page.get_by_label("Zoom in").click()
    nearer = page.evaluate(ends)
    assert start[0][0] < nearer[0][0] < nearer[0][1] < start[0][1]
    page.get_by_role("button", name="Move").click()
    page.locator("#chart-map").scroll_into_view_if_needed()
    box = page.locator("#chart-map").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 380, box["y"] + 240, steps=5)
    page.mouse.up()
    assert page.evaluate(ends) != nearer
    page.get_by_role("button", name="Reset").click()
    assert np.allclose(page.evaluate(ends), start)
    page.get_by_role("button", name="Lasso").click()
    assert page.evaluate("engram.mapOf.model().tools.select.active")


def test_neighbours_in_a_table_say_how_they_differ(browser, tmp_path):
    rows = pd.DataFrame({"size": np.arange(120.0), "same": 1.0, "<b>": ["x", "y"] * 60})
    near = Neighbours(np.arange(3), np.full((3, 2), [60, 80]), np.full((3, 2), [61, -1]))
    path, _ = written(tmp_path, images=None, rows=rows, neighbours=near)
    with opened(browser, path) as shown:
        shown.page.locator("#sort").select_option("id")
        card = shown.page.locator(".card").first
        assert "size 0" in card.locator(".cells").inner_text().replace("\n", " ")
        helped, harmed = (card.locator(".near > div").nth(i) for i in (0, 1))
        assert helped.locator("p").inner_text() == "size higher"
        assert harmed.locator("p").inner_text() == "size higher, <b> other"
        title = harmed.locator("button").get_attribute("title")
        assert title.endswith("size 61, here 0; <b> y, here x")


def test_filters_and_search(made):
    shown, found = made
    wrong = found.flags["likely wrong label"]
    page = shown.page
    page.locator("[data-alert='0']").click()
    assert shown.count() == int(wrong.sum())
    assert page.locator("#issues [aria-pressed=true]").inner_text().startswith("likely wrong")
    assert page.locator("#issues button").count() == 1  # an issue without examples is none
    page.get_by_label("Given label").select_option("1")
    assert shown.count() == int((wrong & (found.given == 1)).sum())
    page.locator("#clear").click()
    page.get_by_label("source", exact=True).select_option(label="camera 2")
    assert shown.count() == list(found.groups["source"]).count("camera 2")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("picture-17.png")
    shown.until("engram.state.query !== ''")
    assert shown.cards() == ["picture-17.png"]
    page.locator("#clear").click()
    assert shown.count() == len(found)
    assert page.locator("#search").input_value() == ""


def test_the_confusion_leads_to_its_examples(made):
    shown, found = made
    cell = shown.page.locator("[data-given='0'][data-predicted='1']")
    both = (found.given == 0) & (found.predicted == 1)
    assert cell.inner_text() == str(both.sum())
    cell.click()
    assert shown.count() == int(both.sum())


@pytest.mark.parametrize("name", ["score", "increase", "prediction_error", "id"])
def test_sorting(made, name):
    shown, found = made
    columns = {"increase": found.loo_loss - found.loss, "id": -np.arange(len(found))}
    column = columns[name] if name in columns else getattr(found, name)
    shown.page.locator("#sort").select_option(name)
    first = np.argsort(-np.float32(column), kind="stable")[:5]
    assert shown.cards()[:5] == [found.ids[i] for i in first]


def test_marks_are_kept_and_exported(made):
    shown, found = made
    page = shown.page
    first, second = (found.ids.index(name) for name in shown.cards()[:2])
    page.keyboard.press("ArrowRight")
    page.keyboard.press("w")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("k")
    assert page.locator("#marks-count").inner_text() == "1 wrong, 1 kept"
    with page.expect_download() as csv_file:
        page.locator("#export-csv").click()
    rows = list(csv.DictReader(io.StringIO(Path(csv_file.value.path()).read_text())))
    assert {int(row["index"]): row["mark"] for row in rows} == {first: "wrong", second: "keep"}
    assert {row["id"] for row in rows} == {found.ids[first], found.ids[second]}
    with page.expect_download() as indices:
        page.locator("#export-indices").click()
    assert json.loads(Path(indices.value.path()).read_text()) == [first]
    page.reload()
    page.wait_for_selector("body[data-ready=charts]")
    assert page.locator("#marks-count").inner_text() == "1 wrong, 1 kept"
    page.locator("#marks-show").click()
    assert sorted(shown.cards()) == sorted([found.ids[first], found.ids[second]])
    page.locator("#marks-clear").click()
    assert page.locator("#marks").is_hidden()


def test_light_and_dark(made):
    shown, page = made[0], made[0].page
    paper = "getComputedStyle(document.body).backgroundColor"
    axis = """[...engram.mapOf.model().plot.document._all_models.values()]
        .find((model) => model.type === "LinearAxis").major_label_text_color"""
    page.emulate_media(color_scheme="dark")  # as the system has it, until the user chooses
    shown.until("document.documentElement.dataset.theme === 'dark'")
    dark = page.evaluate(paper), page.evaluate(axis)
    page.keyboard.press("d")
    light = page.evaluate(paper), page.evaluate(axis)
    assert sum(map(int, dark[0][4:-1].split(","))) < 120
    assert sum(map(int, light[0][4:-1].split(","))) > 700
    assert dark[1] != light[1]


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_window_does_not_scroll_sideways(made, width):
    page = made[0].page
    page.set_viewport_size({"width": width, "height": 800})
    made[0].until(f"document.documentElement.scrollWidth <= {width}")
    box = page.locator(".card").first.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_what_is_read_aloud(made):
    shown, _ = made
    unnamed = shown.page.evaluate(
        """[...document.querySelectorAll("button, input, select, [role=img], section, nav")]
            .filter((node) => !(node.innerText.trim() || node.getAttribute("aria-label")
                || node.getAttribute("aria-labelledby") || node.labels?.length))
            .map((node) => node.outerHTML)"""
    )
    assert unnamed == []
    levels = shown.page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map((node) => +node.tagName[1])"
    )
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_it_prints(made):
    pdf = made[0].page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 50_000


def test_whatever_comes_from_outside_stays_text(browser, tmp_path):
    count = len(HOSTILE)
    found = examples(
        count,
        ids=HOSTILE,
        classes=HOSTILE[:3],
        flags={name: np.arange(count) == i for i, name in enumerate(HOSTILE)},
        groups={HOSTILE[0]: HOSTILE, HOSTILE[3]: HOSTILE},
        texts=HOSTILE,
    )
    path = write_page(page_data_of(found), tmp_path / "page.html")
    for text in ("\u202e", "\u2066", "\x1b", "\x00"):
        assert text not in path.read_text(encoding="utf-8")
    with opened(browser, path) as shown:
        assert shown.page.evaluate("window.hacked") is None
        assert shown.page.locator("main img, main script, main svg").count() == 0
        shown.page.locator("#sort").select_option("id")
        assert shown.cards()[0] == HOSTILE[0]
        assert shown.page.locator(".card .text").nth(3).inner_text() == HOSTILE[3]
        shown.page.locator("#issues button").nth(3).click()
        assert shown.cards() == [HOSTILE[3]]
        place = HOSTILE.index('=HYPERLINK("http://x")')
        shown.page.evaluate(f"engram.mark({place}, 'wrong')")
        row = next(csv.DictReader(io.StringIO(shown.page.evaluate("engram.csv()"))))
        assert row["id"] == "'" + HOSTILE[place]
        assert shown.page.evaluate("window.hacked") is None


def page_data_of(found: Examples) -> Any:
    """Hostile words wherever a page has words."""
    words = "".join(HOSTILE)
    data = page_data(replace(found, flags=found.flags | {"likely wrong label": [1] * len(found)}))
    return replace(
        data,
        headline=Headline(words, words, 0.1, 0.2, verdict="good", reasons=[words], unit=words),
        examples=found,
        alerts=[Alert(words, words, flag=HOSTILE[0]), Alert(words, group=(HOSTILE[0], HOSTILE[1]))],
        effects=[Effect(name, words, 1, 0.1) for name in HOSTILE],
        effects_on=words,
        making=Making({words: words}, {words: words}, words, [words]),
    )


def test_rows_of_a_table_and_numbers_as_labels(browser, tmp_path):
    frame = pd.DataFrame({"age": [31, 42, 17], "town": ["Bern", "<b>Ulm", None]})
    found = Examples([0, 1, 2], [0.1, 0.2, 0.3], [0.2, 0.9, 0.3], given=[1.5, 2.0, 3.0], rows=frame)
    data = page_data(examples(3))
    data = replace(data, examples=found, alerts=(), curves=None)
    with opened(browser, write_page(data, tmp_path / "page.html")) as shown:
        assert shown.cards() == ["1", "2", "0"]
        assert shown.page.locator(".cells").first.inner_text().split() == [
            *("age", "42", "town", "<b>Ulm")
        ]
        assert shown.page.locator(".turn").first.inner_text() == "2"


def test_sixty_thousand_examples(browser, tmp_path):
    """Under 8 MB with 2000 thumbnails, and the cards and the map react."""
    count = 60_000
    noise = np.random.default_rng(0).integers(0, 255, (2500, 32, 32, 3)).astype(np.uint8)

    class Pictures:
        def __len__(self) -> int:
            return count

        def __getitem__(self, place: int) -> Any:
            return noise[place % len(noise)]

    found = examples(count, images=Pictures())
    path = write_page(page_data(found), tmp_path / "page.html")
    assert path.stat().st_size < 8_000_000
    with opened(browser, path) as shown:
        assert shown.page.evaluate("engram.data.sprite.positions.length") == 2000
        assert shown.page.evaluate("engram.mapOf.model().source.data.x.length") == count
        shown.page.locator("#issues button").click()
        assert shown.count() == int(found.flags["likely wrong label"].sum())
