"""Every family file has one shape: one family with the same methods in the same order, explained.

Where two families have one posterior, what they share is a base that stands with them in the file.
"""

import ast
from pathlib import Path

import pytest

import engram.families
from engram.families import Family, VariationalGaussianMixture
from family_cases import CASES

TESTS = Path(__file__).parent
FOLDER = Path(engram.families.__file__).parent
ORDER = [name for name in vars(Family) if name in Family.__abstractmethods__]
RULE = ("ExactLosses", "LearningRule", "MeanLosses", "SampledLosses", "exponential")  # any loss
PUBLIC = [
    name for name in engram.families.__all__ if name not in ("Family", "FamilyPosterior", *RULE)
]


def classes(path):
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def files():
    for path in sorted(FOLDER.glob("*.py")):
        if any(node.name in PUBLIC for node in classes(path)):
            yield pytest.param(path, id=path.stem)


def is_abstract(function):
    return any(getattr(name, "id", "") == "abstractmethod" for name in function.decorator_list)


def contract(node):
    """The methods of the contract that a class defines, as they come."""
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return [item.name for item in functions if item.name in ORDER and not is_abstract(item)]


def bases(node):
    return [base.id for base in node.bases]


@pytest.mark.parametrize("path", files())
def test_all_methods_of_the_contract_in_order(path):
    families = [node for node in classes(path) if node.name in PUBLIC]
    shared = [n for n in classes(path) if "Family" in bases(n) and n.name not in PUBLIC]
    for node in (*families, *shared):
        assert contract(node) == sorted(contract(node), key=ORDER.index)
    if not shared:
        (family,) = families
        assert bases(family) == ["Family"]
        assert contract(family) == ORDER
        return
    (base,) = shared
    assert bases(base) == ["Family"]
    assert len(families) > 1, f"{base.name} is shared by nothing"
    for family in families:
        assert bases(family) == [base.name]
        # each has what its base has not, and nothing twice
        assert sorted(contract(base) + contract(family)) == sorted(ORDER)


@pytest.mark.parametrize("path", files())
def test_the_equation_and_an_example_stand_in_the_docstrings(path):
    assert ".. math::" in ast.get_docstring(ast.parse(path.read_text()))
    for node in classes(path):
        described = ast.get_docstring(node)
        assert described
        assert node.name not in PUBLIC or ("Example:" in described and ">>> " in described)


@pytest.mark.parametrize("name", [*CASES, "variational_mixture"])
def test_a_textbook_or_a_test_of_its_own_checks_it(name):
    functions = ast.walk(ast.parse((TESTS / "test_textbook.py").read_text()))
    found = {item.name for item in functions if isinstance(item, ast.FunctionDef)}
    found |= {path.stem for path in TESTS.glob("test_*.py")}
    assert any(test.startswith(f"test_{name}") for test in found)


def test_all_families_are_covered():
    final = {getattr(engram.families, name) for name in PUBLIC}
    covered = [node.name for param in files() for node in classes(param.values[0])]
    assert {c.__name__ for c in final} <= set(covered)
    assert final == {type(case.family) for case in CASES.values()} | {VariationalGaussianMixture}
    assert len(final) == 12
    assert all(not c.__abstractmethods__ and not c.__subclasses__() for c in final)
