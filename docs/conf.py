"""Builds the pages and the reference: ``make docs``, into ``build/docs``."""

from __future__ import annotations

import re
from typing import Any

import engram

project = "engram"
author = "the authors of engram"
copyright = author
version = release = engram.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
master_doc = "contents"
exclude_patterns = ["figures"]
myst_heading_anchors = 4  # links to headings, as GitHub names them
suppress_warnings = ["myst.xref_missing"]  # tests/test_documents.py checks every link

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures carry them
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # or attributes of data classes stand twice

html_theme = "furo"
html_title = "engram"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

LITERAL = re.compile(r"(``.*?``|:math:`.*?`|`.*?`)")


def marks_are_mathematics(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """``|theta|`` and ``*shape`` mean something else to the builder than to a reader."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...", ".. ")):
            parts = LITERAL.split(line)
            lines[number] = "".join(
                part
                if LITERAL.fullmatch(part)
                else part.replace("|", "\\|").replace("*shape", "\\*shape")
                for part in parts
            )


def setup(app: Any) -> None:
    """Called by the builder."""
    app.connect("autodoc-process-docstring", marks_are_mathematics, priority=900)
