"""A benchmark's outcome as a JSON file for machines and a Markdown page for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def times(value: float | None) -> str:
    """A ratio for a table; what was not measured is a dash."""
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def against(value: float | None, bar: float) -> str:
    """A ratio that is held against a bar; bold where it is above."""
    return f"**{times(value)}**" if value is not None and value > bar else times(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def conditions(environment: dict[str, Any]) -> str:
    """The environment in a sentence."""
    versions = ", ".join(f"{k} {environment[k]}" for k in ("engram", "torch", "python"))
    return (
        f"{versions}; {environment['cores']} cores ({environment['machine']}), "
        f"{environment['threads']} threads, load {environment['load'][0]} at the start, "
        f"seed {environment['seed']}."
    )


def write(folder: Path, name: str, record: dict[str, Any], page: str) -> None:
    """Write name.json and name.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(page.rstrip() + "\n")
