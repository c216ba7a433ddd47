"""The theory is the layout, and imports only point one way."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "engram"
ORDER = (
    {
        "_version",
        "errors",
        "arguments",
        "memory",
        "precision",
        "parameters",
        "peers",
        "progress",
        "equation",
        "identity",
    },
    {"storage"},
    {"likelihoods", "selection", "inputs", "kernels", "surroundings"},
    {"batches", "forms", "loaders", "fidelity", "report"},
    {"families", "posteriors", "curvature", "engine", "optimizers"},
    {"sensitivity"},
    {"tracking", "retraining", "models"},
    {"refinement", "trust"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            if node.module == "engram":
                modules = [f"engram.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        found |= {m.split(".")[1] for m in modules if m.startswith("engram.")}
    return found


def test_every_part_has_its_place() -> None:
    parts = {part_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert parts == set(LEVEL)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in SOURCE.rglob("*.py")
        if part_of(path) != "__init__"
        for name in imported(path) & set(LEVEL)
        if LEVEL[name] > LEVEL[part_of(path)]
    ]
    assert wrong == []
