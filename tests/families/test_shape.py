"""Every family file has one shape: the same methods in the same order."""

import ast
from pathlib import Path

import pytest

import engram.families
from engram.families import Family

FOLDER = Path(engram.families.__file__).parent
ORDER = [name for name in vars(Family) if name in Family.__abstractmethods__]


def family_classes():
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id == "Family" for base in node.bases
            ):
                yield pytest.param(path, node, id=path.stem)


@pytest.mark.parametrize(("path", "node"), list(family_classes()))
def test_one_family_a_file_and_its_methods_in_order(path, node):
    methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
    assert [name for name in methods if name in ORDER] == ORDER
    assert node.name in engram.families.__all__
    others = [c for c in ast.parse(path.read_text()).body if isinstance(c, ast.ClassDef)]
    assert len(others) == 1


def test_all_families_are_covered():
    named = {getattr(engram.families, name) for name in engram.families.__all__}
    final = {c for c in named if issubclass(c, Family) and c is not Family}
    assert len(final) == len(list(family_classes())) == 12
    assert all(not c.__abstractmethods__ and not c.__subclasses__() for c in final)
