"""A real browser for the tests of a page: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram.report.html import write_page
from engram.report.page import (
    Alert,
    Comparison,
    Curves,
    Effect,
    Examples,
    Headline,
    Making,
    Neighbours,
    PageData,
)

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
READY = "body[data-ready=charts]"
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 120_000  # milliseconds: other work may have the cores


def chromium() -> str:
    """The browser; a test without one is skipped."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = [shutil.which(name) for name in (os.environ.get("ENGRAM_BROWSER", ""), *NAMES) if name]
    if not any(found):
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return next(path for path in found if path)


@contextmanager
def launched() -> Iterator[Any]:
    """A browser until the block ends."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page in a browser, with what it said and asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def until(self, expression: str) -> None:
        """Wait until something is so; the page's policy forbids playwright's own way."""
        for _ in range(PATIENCE // 50):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never: {expression}")

    def count(self) -> int:
        """How many examples the filters leave."""
        return int(self.page.evaluate("engram.state.order.length"))

    def cards(self) -> list[str]:
        """Ids of the cards, in their order."""
        found: list[str] = self.page.locator(".card .what .id").all_inner_texts()
        return found


@contextmanager
def opened(browser: Any, path: Path, wait: str = READY, **context: Any) -> Iterator[Opened]:
    """A page, once it is complete; it must have said nothing, and asked for nothing."""
    settings = {"viewport": {"width": 1200, "height": 900}, "accept_downloads": True} | context
    window = browser.new_context(**settings)
    window.set_default_timeout(PATIENCE)
    page = window.new_page()
    found = Opened(page)
    page.on("console", lambda m: m.type in ("error", "warning") and found.errors.append(m.text))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector(wait)
    try:
        yield found
        outside = [u for u in found.requests if not u.startswith((path.as_uri(), "data:", "blob:"))]
        assert outside == []
        assert found.errors == []
    finally:
        window.close()


def examples(count: int, seed: int = 0, **more: Any) -> Examples:
    """Made-up examples of three classes, with everything that a page can show."""
    random = np.random.default_rng(seed)
    given = random.integers(0, 3, count)
    logits = random.normal(size=(count, 3))
    logits[np.arange(count), given] += random.gamma(2.0, 1.5, count)
    before = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    logits += random.normal(size=(count, 3)) * random.gamma(1.0, 0.5, (count, 1))
    after = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    own = np.arange(count), given
    columns: dict[str, Any] = {
        "ids": [f"picture-{i}.png" for i in range(count)],
        "loss": -np.log(before[own]),
        "loo_loss": -np.log(after[own]),
        "score": np.abs(after - before).sum(1),
        "prediction_error": 1 - before[own],
        "prediction_variance": random.gamma(1.0, 0.1, count),
        "classes": ["cat", "dog", "horse"],
        "given": given,
        "predicted": after.argmax(1),
        "probabilities": before,
        "loo_probabilities": after,
        "trust": random.integers(0, 3, count),
        "flags": {"likely wrong label": after.argmax(1) != given, "never": np.zeros(count)},
        "groups": {"source": [f"camera {k}" for k in random.integers(0, 4, count)]},
    }
    return Examples(**columns | more)


def page_data(found: Examples) -> PageData:
    """A page with every section."""
    steps, size = np.arange(1, 9), len(found)
    scores = np.linspace(0.1, 1, 8)[:, None] * np.abs(np.sin(np.arange(size)))[None]
    curves = Curves(
        steps,
        1 / steps,
        1 / steps + 0.05 * steps,
        loo_low=1 / steps + 0.04 * steps,
        loo_high=1 / steps + 0.06 * steps,
        validation=1 / steps + 0.05 * steps,
        stop=4,
        scores=scores,
        leverage=np.tile([0.1, 0.2, 0.3, 0.4, 0.5], (8, 1)),
    )
    effects = [
        Effect("cat", "class", 30, 0.2, 0.1, 0.3, "good"),
        Effect("dog", "class", 30, -0.1, -0.2, 0.05, "caution"),
        Effect("camera 0", "source", 20, -0.3),
    ]
    return PageData(
        Headline("A title", "One sentence.", 0.2, 0.4, (0.3, 0.5), 0.91, verdict="caution"),
        found,
        [Alert("Wrong labels", flag="likely wrong label"), Alert("Overfits", section="training")],
        effects,
        curves=curves,
        comparisons=[Comparison("score", [0.1, 0.3], [0.2, 0.25], noise=0.01)],
        making=Making({"score": "How far."}, {"seed": 0}, "engram audit data.csv"),
    )


def written(folder: Path, count: int = 120, **more: Any) -> tuple[Path, Examples]:
    """The file of such a page, with pictures and neighbours, and its examples."""
    random = np.random.default_rng(1)
    worst = examples(count).loo_loss.argsort()[::-1][:5].copy()
    near = Neighbours(worst, random.integers(0, count, (5, 2)), -np.ones((5, 2)))
    pictures = random.integers(0, 255, (count, 8, 8)).astype(np.uint8)
    found = examples(count, **{"images": pictures, "neighbours": near} | more)
    return write_page(page_data(found), folder / "page.html"), found
