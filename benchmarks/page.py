"""The page in a browser: its size, when it is there, how it moves; chart libraries compared.

``python -m benchmarks.page`` needs playwright and a Chromium, and plotly for its side of the
comparison. Without a graphics card WebGL is computed by the processor, as on many servers and in
virtual machines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from engram.auditing.neighbours import EACH, MOST
from engram.report.html import write_page
from engram.report.page import Examples, Headline, Neighbours, PageData

COUNT = 60_000  # points
CLASSES = 10
PICTURES = 2500  # different pictures of noise, which no encoder makes small
SIDE = 32  # pixels of one
MOVES = 6  # of the mouse in a drag: few, since without a graphics card one takes seconds
SEED = 0
NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def examples() -> Examples:
    """Made-up examples with everything that takes room: ids, probabilities, groups, pictures."""
    random = np.random.default_rng(SEED)
    given = random.integers(0, CLASSES, COUNT)
    logits = random.normal(size=(COUNT, CLASSES))
    logits[np.arange(COUNT), given] += random.gamma(2.0, 2.0, COUNT)
    moved = logits + random.normal(size=logits.shape) * random.gamma(1.0, 0.5, (COUNT, 1))
    before, after = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, moved))
    own = np.arange(COUNT), given
    pictures = random.integers(0, 255, (PICTURES, SIDE, SIDE, 3)).astype(np.uint8)
    return Examples(
        [f"train/{number:05d}.png" for number in range(COUNT)],
        loss=-np.log(before[own]),
        loo_loss=-np.log(after[own]),
        score=np.abs(after - before).sum(1),
        prediction_error=1 - after[own],
        prediction_variance=random.beta(1.0, 6.0, COUNT),
        classes=[f"class {number}" for number in range(CLASSES)],
        given=given,
        predicted=after.argmax(1),
        probabilities=before,
        loo_probabilities=after,
        trust=random.integers(0, 3, COUNT),
        flags={"likely wrong label": after.argmax(1) != given},
        groups={"source": [f"camera {number}" for number in random.integers(0, 5, COUNT)]},
        label_score=after[own],
        images=[pictures[number % PICTURES] for number in range(COUNT)],
        neighbours=neighbours(random, after[own]),
    )


def neighbours(random: np.random.Generator, known: np.ndarray) -> Neighbours:
    """Of the examples that look most wrong, as many as an audit has."""
    of = known.argsort()[:MOST]
    sides = random.integers(0, COUNT, (2, MOST, EACH))
    effects = random.gamma(1.0, 0.1, (2, MOST, EACH))
    return Neighbours(of, *sides, effects[0], -effects[1])


def by_bokeh(backend: str, marker: str, decimated: bool) -> Callable[[Path], None]:
    """A page with a bare chart of bokeh; decimated ones draw a tenth of the points while moved."""

    def make(path: Path) -> None:
        from bokeh.embed import file_html
        from bokeh.plotting import figure
        from bokeh.resources import INLINE

        plot = figure(
            width=900,
            height=560,
            tools="pan",
            output_backend=backend,
            lod_threshold=2000 if decimated else None,
        )
        plot.scatter(*points(), size=4, marker=marker, line_color=None, fill_alpha=0.7)
        path.write_text(file_html(plot, INLINE))

    return make


def by_plotly(path: Path) -> None:
    """A page with a bare chart of plotly, by WebGL: without it so many points take minutes."""
    import plotly.graph_objects as graph

    x, y = points()
    figure = graph.Figure(graph.Scattergl(x=x, y=y, mode="markers", marker={"size": 4}))
    figure.update_layout(width=900, height=560, dragmode="pan")
    figure.write_html(path, include_plotlyjs="inline")


def points() -> tuple[Any, Any]:
    """Where the points of a bare chart lie."""
    x, y = np.random.default_rng(SEED).normal(size=(2, COUNT)).astype(np.float32)
    return x, y


LIBRARIES = {
    "bokeh, canvas, squares, a tenth while moved (the page)": by_bokeh("canvas", "square", True),
    "bokeh, canvas, circles, all of them": by_bokeh("canvas", "circle", False),
    "bokeh, WebGL": by_bokeh("webgl", "circle", False),
    "plotly, WebGL": by_plotly,
}


def processor_seconds() -> float:
    """What the browser has used so far: it hardly depends on who else has the cores."""
    times = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times.append(process.cpu_times())
    return sum(found.user + found.system for found in times)


def measured_library(browser: Any, make: Callable[[Path], None], path: Path) -> dict[str, float]:
    """Size in MB, processor seconds until the chart is there, and of a move of the mouse."""
    make(path)
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    page.set_default_timeout(300_000)
    start = processor_seconds()
    page.goto(path.as_uri())
    page.wait_for_selector(".bk-Figure, .main-svg")
    page.wait_for_function("!window.Bokeh || Bokeh.documents.every((found) => found.is_idle)")
    page.evaluate(NEXT_FRAME)
    there = processor_seconds() - start
    move = dragged(page, 400, 300)
    page.close()
    return {"megabytes": path.stat().st_size / 1e6, "there": there, "move": move}


def dragged(page: Any, x: float, y: float) -> float:
    """Processor seconds of a move of the mouse in a drag, each seen on the screen."""
    page.mouse.move(x, y)
    page.mouse.down()
    start = processor_seconds()
    for step in range(1, MOVES + 1):
        page.mouse.move(x + 8 * step, y + 4 * step)
        page.evaluate(NEXT_FRAME)
    seconds = processor_seconds() - start
    page.mouse.up()
    return seconds / MOVES


def measured_page(browser: Any, path: Path) -> dict[str, float]:
    """Our page: size, first picture, map, a filter, and a drag of the map."""
    headline = Headline("60,000 examples", "All of them.", 0.2, 0.4, verdict="good")
    write_page(PageData(headline, examples()), path)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(300_000)
    start = processor_seconds()
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready=charts]")
    there = processor_seconds() - start
    entry = "performance.getEntriesByName('{}')[0].startTime / 1000"
    found = {
        "megabytes": path.stat().st_size / 1e6,
        "first_picture": page.evaluate(entry.format("first-contentful-paint")),
        "map": page.evaluate(entry.format("map")),
        "there": there,
    }
    start = processor_seconds()
    page.evaluate("document.querySelector('#issues button').click()")
    page.evaluate(NEXT_FRAME)
    found["filter"] = processor_seconds() - start
    page.evaluate("engram.reset()")
    page.get_by_role("button", name="Move").click()
    page.locator("#chart-map").scroll_into_view_if_needed()
    box = page.locator("#chart-map").bounding_box()
    found["move"] = dragged(page, box["x"] + 300, box["y"] + 200)
    page.close()
    return found


def measure(libraries: Mapping[str, Callable[[Path], None]]) -> dict[str, Any]:
    """All of it, in one browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--headless", "--no-sandbox", "--disable-gpu"],
        )
        path = Path(folder) / "page.html"
        found: dict[str, Any] = {"page": measured_page(browser, path), "libraries": {}}
        for name, make in libraries.items():
            found["libraries"][name] = measured_library(browser, make, path)
            print(name, json.dumps(found["libraries"][name]), flush=True)
        found["browser"] = browser.version
        browser.close()
    return found


def document(record: dict[str, Any]) -> str:
    """The Markdown page."""
    page = record["page"]
    names = {
        "megabytes": "size of the file, MB",
        "first_picture": "first picture after, s by the clock",
        "map": "map drawn after, s by the clock",
        "there": "all of it, processor s",
        "filter": "a filter by issue, processor s",
        "move": "a move in a drag of the map, processor s",
    }
    rows = [[words, f"{page[key]:.2f}"] for key, words in names.items()]
    libraries = [
        [name, *(f"{found[key]:.2f}" for key in ("megabytes", "there", "move"))]
        for name, found in record["libraries"].items()
    ]
    header = ["chart of 60,000 points", "MB", "there, processor s", "a move in a drag, processor s"]
    return f"""# The page in a browser

`python -m benchmarks.page --page`: 60,000 examples of ten classes with ids, probabilities, a
grouping, the neighbours of 240 of them, and 2,000 thumbnails in colour, of noise. Chromium
{record["browser"]} without a graphics card.
{conditions(record["environment"])}
Other work had the cores too: seconds by the clock are upper bounds. Processor seconds are those of
all processes of the browser together.

{table(["our page", ""], rows)}

## The library of the charts

A page with nothing but a scatter plot that can be dragged; WebGL by the processor. By
`python -m benchmarks.page`, in an earlier run.

{table(header, libraries)}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="ours alone; libraries as they were")
    alone = parser.parse_args().page
    record = {"environment": environment(SEED), **measure({} if alone else LIBRARIES)}
    if alone:
        record["libraries"] = json.loads((RESULTS / "page.json").read_text())["libraries"]
    write(RESULTS, "page", record, document(record))
