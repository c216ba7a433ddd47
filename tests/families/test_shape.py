"""Every family file has one shape: the same methods in the same order."""

import ast
from pathlib import Path

import pytest

import engram.families
from engram.families import Family

FOLDER = Path(engram.families.__file__).parent
ORDER = [name for name in vars(Family) if name in Family.__abstractmethods__]


def classes(path):
    return {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)}


def families_in(path):
    """The public families of a file, each with the classes it takes methods from."""
    known = classes(path)
    for name, node in known.items():
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        if name in engram.families.__all__ and name not in ("Family", "FamilyPosterior"):
            yield name, [node, *(known[base] for base in bases if base in known)]


def all_families():
    for path in sorted(FOLDER.glob("*.py")):
        for name, nodes in families_in(path):
            yield pytest.param(path, nodes, id=name)


def methods(node):
    return [item.name for item in node.body if isinstance(item, ast.FunctionDef)]


@pytest.mark.parametrize(("path", "nodes"), list(all_families()))
def test_one_family_a_file_and_its_methods_in_order(path, nodes):
    for node in nodes:
        own = [name for name in methods(node) if name in ORDER]
        assert own == sorted(own, key=ORDER.index)
    assert {name for node in nodes for name in methods(node)} >= set(ORDER)
    together = list(families_in(path))
    assert len(together) == 1 or all(len(shared) == 2 for _, shared in together)


def test_all_families_are_covered():
    named = {getattr(engram.families, name) for name in engram.families.__all__}
    final = {c for c in named if issubclass(c, Family) and c is not Family}
    assert len(final) == len(list(all_families())) == 12
    assert all(not c.__abstractmethods__ and not c.__subclasses__() for c in final)
