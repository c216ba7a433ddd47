"""A page that is built from top to bottom and written as one file."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from html import escape as escaped
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from engram.core.printable import printable
from engram.core.storage.files import write_text

RESOLUTION = 140
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 60rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin-bottom: .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 46rem; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; }
figcaption { color: #5d636d; font-size: .9rem; max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e3e5e9; }
th { color: #5d636d; font-weight: 600; border-bottom-color: #9aa0aa; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { color: #5d636d; } dd { margin: 0; font-variant-numeric: tabular-nums; }
footer { margin-top: 3rem; color: #5d636d; font-size: .85rem; }
"""


def escape(words: object) -> str:
    """The words as HTML shows them, also marks that would turn the direction of writing."""
    return escaped(printable(words), quote=True)


class Page:
    """HTML with everything that comes from outside escaped.

    Example:
        >>> page = Page("a < b").text("1 & 2")
        >>> "a &lt; b" in page.html(), "1 &amp; 2" in page.html()
        (True, True)
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> Page:
        """A section begins."""
        return self._add(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> Page:
        """A paragraph."""
        return self._add(f"<p>{escape(text)}</p>")

    def facts(self, values: Mapping[str, object]) -> Page:
        """Names with one value each."""
        rows = (f"<dt>{escape(k)}</dt><dd>{escape(shown(v))}</dd>" for k, v in values.items())
        return self._add(f"<dl>{''.join(rows)}</dl>")

    def table(self, frame: pd.DataFrame) -> Page:
        """A table with its index as the first column."""
        names = [str(frame.index.name or ""), *map(str, frame.columns)]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(shown(v))}</td>" for v in row) + "</tr>"
            for row in frame.itertuples()
        )
        return self._add(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def figure(self, figure: Figure, caption: str) -> Page:
        """A picture, held in the page itself."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=RESOLUTION)
        width = round(96 * figure.get_figwidth())
        data = base64.b64encode(buffer.getvalue()).decode()
        title = escape(caption)
        return self._add(
            f'<figure><img width="{width}" alt="{title}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def _add(self, part: str) -> Page:
        self._parts.append(part)
        return self

    def html(self) -> str:
        """The whole page."""
        title = escape(self.title)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            + "\n".join(self._parts)
            + "\n</body>\n</html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page, whole; folders are made."""
        return write_text(path, self.html())


def shown(value: object) -> str:
    """A value for reading: four digits, a dash for what is not there."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
