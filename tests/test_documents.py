"""The documents are true: Python runs and prints what they show, links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?%?")
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
    """What was printed, numbers and spacing aside: those may differ between machines."""
    return NUMBER.sub("#", output).split()


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
                assert words(printed) == words(body), f"{name(path)}:{line + 1} shows other text"


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
