"""The theory is the layout, and imports only point one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "engram"
ORDER = (
    {"_version", "errors"},
    {"core"},
    {"linalg", "likelihoods", "families", "data"},
    {"engine"},
    {"curvature"},
    {"optimizers"},
    {"training"},
    {"posteriors"},
    {"problem"},
    {"trust"},
    {"sensitivity"},
    {"retraining"},
    {"evidence"},
    {"tracking", "models"},
    {"planning"},
    {"report"},
    {"auditing"},
    {"exports"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
# Doors: these may import `report` inside a function, so that it is loaded when asked for
# (`result.report()`, `tracker.history.figure()`), and never with the module.
DOORS = {"sensitivity", "tracking", "evidence", "retraining", "models"}
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside |= set(ast.walk(node))
    return _parts(set(ast.walk(tree)) - inside) | _behind_doors(path, _parts(inside))


def _behind_doors(path: Path, found: set[str]) -> set[str]:
    return found - {"report"} if part_of(path) in DOORS else found


def _parts(nodes: set[ast.AST]) -> set[str]:
    """The parts of engram that these nodes import."""
    found = set()
    for node in nodes:
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            if node.module == "engram":
                modules = [f"engram.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        found |= {m.split(".")[1] for m in modules if m.startswith("engram.")}
    return found


def against_the_order() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        own = part_of(path)
        if own == "__init__":
            continue
        for name in (imported(path) & set(LEVEL)) - {own}:
            if LEVEL[name] >= LEVEL[own]:
                yield f"{path.relative_to(SOURCE)} imports {name}"


def test_every_part_has_its_place() -> None:
    parts = {part_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert parts == set(LEVEL)


def test_imports_point_one_way() -> None:
    assert sorted(against_the_order()) == []


def test_tests_mirror_the_source() -> None:
    tests = Path(__file__).parent
    kept = {"fixtures", "golden"}  # saved folders, and numbers that must not change
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert [
        str(folder)
        for folder in sorted(folders)
        if folder.parts and folder.parts[0] not in kept and not (SOURCE / folder).is_dir()
    ] == []


def test_nobody_asks_a_block_for_its_kind() -> None:
    asked = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if part_of(path) != "linalg"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "isinstance"
        and "Block" in ast.unparse(node.args[1])
    ]
    assert asked == []
