"""Draws docs/images/import-graph.svg: which folder of engram uses which, lowest first.

``python -m docs.figures.import_graph`` draws and prints what the picture cannot show: how many
files and lines there are, and which files serve one other file alone. Folders that need each other
are an error.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "engram"
TARGET = ROOT / "docs" / "images" / "import-graph.svg"
TOP = ("__init__", "__main__", "_version")  # what is no part of the theory
Edges = Counter[tuple[str, str]]
Point = tuple[float, float]
INK, EDGE, DOOR = "#1b1b1b", "#1f5f99", "#c8553d"


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, bool]]:
    """The modules of engram that a file imports, and whether only when a function is called."""
    tree = ast.parse(path.read_text())
    late = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engram"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in known else str(node.module)), id(node) in late
        elif isinstance(node, ast.Import):
            yield from ((a.name, id(node) in late) for a in node.names if a.name in known)


def importers(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Who imports each module."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in known.items():
        for used, _ in imports(path, known):
            if used != module and used in known:
                found[used].add(module)
    return found


def single_importers(known: Mapping[str, Path]) -> dict[str, str]:
    """Files, packages aside, that one other file alone imports, and which."""
    users = importers(known)
    return {
        module: next(iter(users[module]))
        for module, path in known.items()
        if len(users[module]) == 1 and path.name != "__init__.py"
    }


def folder(module: str) -> str:
    """The part of the house that a module is in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def edges(known: Mapping[str, Path]) -> tuple[Edges, Edges]:
    """How often one folder imports another: when it is loaded, and when something is asked for."""
    found: tuple[Edges, Edges] = Counter(), Counter()
    for module, path in known.items():
        for used, late in imports(path, known):
            pair = folder(module), folder(used)
            if pair[0] != pair[1] and not set(pair) & set(TOP):
                found[late][pair] += 1
    return found


def levels(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How many folders a folder stands on, counted along the longest way down."""
    below: dict[str, set[str]] = {name: set() for name in names}
    for user, used in pairs:
        below[user].add(used)
    found: dict[str, int] = {}

    def level(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            raise ValueError(f"folders need each other: {' -> '.join((*above, name))}")
        if name not in found:
            found[name] = max((level(n, (*above, name)) + 1 for n in below[name]), default=0)
        return found[name]

    for name in below:
        level(name, ())
    return found


def draw(at: Mapping[str, int], now: Edges, late: Edges) -> Figure:
    """Folders by level; the wider an arrow, the more imports. All stand on core, which has none."""
    rows: dict[int, list[str]] = defaultdict(list)
    for name, level in sorted(at.items()):
        rows[level].append(name)
    place = {
        name: (2.2 * (number - (len(names) - 1) / 2) + 0.55 * (-1) ** level, float(level))
        for level, names in rows.items()
        for number, name in enumerate(names)
    }
    figure = Figure(figsize=(7.5, 0.75 * len(rows) + 1), layout="constrained")
    axes = figure.add_subplot()
    for pairs, colour in ((now, EDGE), (late, DOOR)):
        kept = [(pair, count) for pair, count in pairs.items() if pair[1] != "core"]
        for number, (pair, count) in enumerate(kept):
            _arrow(axes, place[pair[0]], place[pair[1]], count, colour, 0.25 * (-1) ** number)
    for name, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": INK, "lw": 0.8}
        axes.text(x, y, name, ha="center", va="center", fontsize=10, color=INK, bbox=box)
    axes.set_xlim(-4.5, 4.5)
    axes.set_ylim(-0.6, max(rows) + 0.6)
    axes.set_axis_off()
    return figure


def _arrow(axes: Axes, start: Point, end: Point, count: int, colour: str, bend: float) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=7,
            connectionstyle=f"arc3,rad={bend}",
            lw=0.3 + min(2.0, 0.06 * count),
            color=colour,
            alpha=0.45,
            shrinkA=12,
            shrinkB=12,
        )
    )


def main() -> None:
    """Draw, and print the counts."""
    known = modules()
    now, late = edges(known)
    names = {folder(module) for module in known} - set(TOP)
    at = levels(names, now)
    matplotlib.rcParams["svg.hashsalt"] = "engram"  # the same picture has the same bytes
    draw(at, now, late).savefig(TARGET, metadata={"Date": None})
    lines = sum(len(path.read_text().splitlines()) for path in known.values())
    single = single_importers(known)
    height = max(at.values()) + 1
    print(f"{len(known)} files, {lines:,} lines, {len(names)} folders on {height} levels")
    print(f"{len(single)} files serve one other file alone:")
    for module, user in sorted(single.items()):
        print(f"  {module} <- {user}")


if __name__ == "__main__":
    main()
