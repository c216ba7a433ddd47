"""A page as one file of HTML that needs nothing else: no network, no folder beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from engram.core.printable import printable
from engram.core.storage.files import write_text
from engram.report.page import PageData


def write_page(data: PageData, path: str | Path) -> Path:
    """Write a page, whole; folders are made.

    Args:
        data: what stands on it.
        path: of the file.

    Returns:
        The path.
    """
    return write_text(path, html_of(data))


def html_of(data: PageData) -> str:
    """The whole page as text."""
    template = _templates().get_template("page.html.j2")
    return template.render(data=data)


@cache
def _templates() -> Environment:
    """The package's templates: everything that is put into one is escaped."""
    environment = Environment(
        loader=PackageLoader("engram.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain,
    )
    return environment


def _plain(value: object) -> object:
    """Words without control characters and marks of writing direction; numbers as they are."""
    return printable(value) if type(value) is str else value
