"""What decides is a field: ``settings`` and ``provenance`` are records, and no code asks them.

A record is written by whoever makes a thing, printed, and saved. A function that takes an entry out
of one, or branches on one, decides by words that somebody wrote for people to read.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "engram"
RECORDS = ("settings", "provenance")
OTHER_THINGS = {"engine", "curvature", "demo", "cli"}
"""Parts where ``settings`` are those of a layer's call, or of the demonstration."""
READING = ("get", "pop", "items", "values", "keys")
PRINTS = {"report"}
"""Parts that show records to people."""
PRINTING = ("__repr__", "__str__")
ALLOWED = {
    "sensitivity/provenance.py: noted": "writes: a list in a record goes on",
    "auditing/page.py: _grouping": "shows: the column's name beside its groups",
    "auditing/page.py: _making": "shows: all settings that were given",
    "auditing/command.py: command_of": "shows: all settings, as one would type them",
    "auditing/trained_again.py: trained_again": "makes a run anew: they are its arguments",
}


def is_record(node: ast.AST, tainted: set[str]) -> bool:
    """An attribute or a name that stands for a record, or for something that came out of one."""
    if isinstance(node, ast.Attribute):
        return node.attr in RECORDS
    return isinstance(node, ast.Name) and node.id in (*RECORDS, *tainted)


def holds_record(node: ast.AST, tainted: set[str]) -> bool:
    return any(is_record(part, tainted) for part in ast.walk(node))


def names_of_records(function: ast.FunctionDef) -> set[str]:
    """Names that were given a record or a part of one."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and holds_record(node.value, found):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def asks(function: ast.FunctionDef) -> bool:
    """Whether an entry of a record is read, or a branch taken by one."""
    tainted = names_of_records(function)
    for part in ast.walk(function):
        entry = isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load)
        method = isinstance(part, ast.Attribute) and part.attr in READING
        if (entry or method) and is_record(part.value, tainted):
            return True
        tests: list[ast.AST] = []
        if isinstance(part, ast.If | ast.While | ast.IfExp | ast.Assert):
            tests = [part.test]
        elif isinstance(part, ast.Compare | ast.Match):
            tests = [part]
        elif isinstance(part, ast.comprehension):
            tests = list(part.ifs)
        if any(holds_record(test, tainted) for test in tests):
            return True
    return False


def asking() -> list[str]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if place.parts[0] in OTHER_THINGS | PRINTS:
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            named = isinstance(function, ast.FunctionDef) and function.name not in PRINTING
            if named and asks(function):
                found.append(f"{place}: {function.name}")
    return found


def test_no_code_decides_by_a_record() -> None:
    assert [place for place in asking() if place not in ALLOWED] == []


def test_what_is_allowed_is_there() -> None:
    assert set(ALLOWED) <= set(asking())


@pytest.mark.parametrize(
    "line",
    [
        "return result.provenance['settings']",
        "return posterior.settings.get('estimator')",
        "return 1 if 'refined' in posterior.settings else 2",
        "taken = dict(posterior.settings)\n    if taken: return 1",
        "return [a for a in b if a == posterior.settings]",
    ],
)
def test_such_code_is_found(line: str) -> None:
    (function,) = ast.parse(f"def decide(result, posterior, b):\n    {line}").body
    assert isinstance(function, ast.FunctionDef)
    assert asks(function)


def test_writing_and_passing_on_is_no_question() -> None:
    text = "def note(p):\n    s = {**p.settings}\n    s['b'] = 2\n    return make(p, settings=s)"
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert not asks(function)
