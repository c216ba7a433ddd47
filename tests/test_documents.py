"""The documents are true: Python runs and prints what they show, links lead somewhere."""

import ast
import math
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import engram

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)\s]+)\)")
KINDS = {"python", "text", "console", "bibtex", "json"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[tuple[str, str, int]]:
    """(kind, body, line of the body) of every fenced block."""
    text = path.read_text()
    return [
        (match["kind"], match["body"], text.count("\n", 0, match.start("body")))
        for match in FENCE.finditer(text)
    ]


def words(output: str) -> list[str]:
    """What was printed, numbers and spacing aside."""
    return NUMBER.sub("#", output).split()


def numbers(output: str) -> list[float]:
    """The numbers that were printed, in order."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(output)]


def same_to_two_digits(found: float, shown: float) -> bool:
    """Up to one in the second digit: the rest may differ between machines."""
    if shown == 0 or found == 0:
        return abs(found - shown) < 0.01
    unit = 10.0 ** (math.floor(math.log10(abs(shown))) - 1)
    return abs(found - shown) <= unit


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_runs_and_prints_what_is_shown(path, tmp_path, monkeypatch, capsys):
    """One script a document: its blocks share a namespace and run in order."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    printed = ""
    with torch.random.fork_rng(devices=[]):
        for kind, body, line in blocks(path):
            if kind == "python":
                exec(compile("\n" * line + body, path, "exec"), namespace)
                printed = capsys.readouterr().out
            elif kind == "text":
                where = f"{name(path)}:{line + 1}"
                assert words(printed) == words(body), f"{where} shows other text"
                if path.name == "README.md":
                    pairs = zip(numbers(printed), numbers(body), strict=True)
                    off = [pair for pair in pairs if not same_to_two_digits(*pair)]
                    assert not off, f"{where} shows other numbers (found, shown): {off}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_no_block_escapes(path):
    """A block marked in any other way than these would not be run."""
    assert {kind for kind, _, _ in blocks(path)} <= KINDS


def anchors(path: Path) -> set[str]:
    """The names that headings can be linked by."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path):
    for match in LINK.finditer(FENCE.sub("", path.read_text())):
        file, _, anchor = match["target"].partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name(path)} links to {match['target']}, which does not exist"
        assert not anchor or anchor in anchors(target), f"no heading for {match['target']}"


REFERENCE = ROOT / "docs" / "reference"
DIRECTIVE = re.compile(r"^\.\. auto(?P<kind>\w+):: engram\.(?P<name>[\w.]+)$", re.MULTILINE)


def test_the_reference_has_every_public_name():
    """And no other: what it names is there."""
    text = "".join(path.read_text() for path in REFERENCE.glob("*.rst"))
    listed = {match["name"] for match in DIRECTIVE.finditer(text)}
    assert set(engram.__all__) - {"__version__"} <= listed
    for found in listed:
        resolve_name(f"engram.{found}")


def test_every_page_is_in_the_contents():
    """The contents list pages by name; results come by pattern."""
    text = (ROOT / "docs" / "contents.rst").read_text()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"^   ([\w-]+)$", text, re.MULTILINE))


def is_property(node: ast.AST) -> bool:
    """A function that reads as an attribute."""
    decorators = getattr(node, "decorator_list", [])
    return any(getattr(mark, "id", "") in ("property", "cached_property") for mark in decorators)


def test_the_reference_takes_no_half_of_a_sentence_for_a_type():
    """What stands before a colon in the first line of a property is read as its type."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in filter(is_property, ast.walk(ast.parse(path.read_text()))):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            plain = re.sub(r":\w+:`[^`]*`|``[^`]*``", "", first)
            assert ": " not in plain, f"{name(path)}: {node.name}: {first!r}"


def test_attributes_stand_one_by_one():
    """Several names before one colon come out as a name and its type."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                _, _, listed = (ast.get_docstring(node) or "").partition("Attributes:\n")
                several = re.search(r"^    \w+(, \w+)+:", listed.partition("\n\n")[0], re.MULTILINE)
                assert several is None, f"{name(path)}: {node.name}: {several[0]!r}"
