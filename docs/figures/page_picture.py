"""The picture of a page at the top of the README.

``python -m docs.figures.page_picture run/demo/report.html`` after ``make demo``; it needs
playwright and a Chromium.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image

WIDTH, HEIGHT = 1200, 1690  # CSS pixels: down to the first row of cards
SCALE = 1.5  # device pixels each, for screens that have them
COLOURS = 256  # of the picture: the page has few, and the file stays small
TARGET = Path(__file__).parent.parent / "images" / "page.png"


def picture(page: Path) -> bytes:
    """The first screen of a page as PNG."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox"]
        )
        size = {"width": WIDTH, "height": HEIGHT}
        window = browser.new_page(viewport=size, device_scale_factor=SCALE)
        window.goto(page.resolve().as_uri())
        window.wait_for_selector("body[data-ready=charts]")
        window.wait_for_timeout(500)  # until the last chart is painted
        found: bytes = window.screenshot()
        browser.close()
    return found


if __name__ == "__main__":
    image = Image.open(io.BytesIO(picture(Path(sys.argv[1])))).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size / 1000:.0f} kB")
