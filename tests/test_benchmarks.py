"""Benchmarks are not typed and take long: at least the names that they take from engram exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def taken(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "engram":
            yield from ((str(node.module), alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    if importlib.util.find_spec(module) is None:
        return False
    known = hasattr(importlib.import_module(module), name)
    return known or importlib.util.find_spec(f"{module}.{name}") is not None


def test_every_name_that_they_import_is_there() -> None:
    files = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/**/*.py")]
    missing = [
        f"{path.relative_to(ROOT)}: {name} of {module}"
        for path in files
        for module, name in taken(path)
        if not exists(module, name)
    ]
    assert files
    assert missing == []
