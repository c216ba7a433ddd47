"""The page that says where the paper is: every file, test, panel and command named is there."""

import ast
import re
from pathlib import Path

import pytest
from experiments.figures import PANELS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "results" / "conformance.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))
SOURCES = sorted(set(re.findall(r"`?([a-z_]+/[a-z_/]+\.py)`?(?!::)", PAGE)))
COMMANDS = sorted(set(re.findall(r"`python -m (benchmarks\.\w+)`", PAGE)))


@pytest.mark.parametrize("name", TESTS)
def test_the_tests_are_there(name):
    path, function = name.split("::")
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert function in found


def test_the_code_is_there():
    places = [path for path in SOURCES if not path.startswith(("tests/", "experiments/"))]
    assert len(places) > 30
    assert [path for path in places if not (ROOT / "src" / "engram" / path).is_file()] == []


def test_every_panel_of_the_paper_has_its_command():
    named = set(re.findall(r"`python -m experiments run ([\w-]+)", PAGE))
    assert named <= set(PANELS)
    assert {name for name in PANELS if name.startswith("fig")} <= named


def test_the_benchmarks_are_there():
    assert COMMANDS
    for command in COMMANDS:
        module = ROOT / Path(*command.split("."))
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


def test_every_equation_has_a_row():
    rows = re.findall(r"^\| ([\d, ]+) \|", PAGE.split("## Table 1")[0], re.MULTILINE)
    numbers = sorted(int(number) for row in rows for number in row.split(","))
    assert numbers == list(range(1, 44))
