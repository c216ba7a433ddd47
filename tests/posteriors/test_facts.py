"""What decides about a posterior is a field of it, the same whoever fitted it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.curvature.kinds import Curvature
from engram.likelihoods import Gaussian
from engram.optimizers import VON, GaussNewton, Newton, OnlineNewton
from minima import to_minimum

SOURCE = Path(engram.__file__).parent
DELTA = 5.0
Problem = tuple[nn.Module, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = (torch.randn(40, 3).double(), torch.randint(0, 3, (40,)))
    to_minimum(model, data, DELTA)
    return model, data


def stepped(problem: Problem, kind: type[Newton] = Newton, **settings: object) -> engram.Posterior:
    """Of an optimizer that ends at the minimum, where the model already is."""
    model, (x, y) = problem
    optimizer = kind(model.parameters(), num_data=len(x), prior_precision=DELTA, lr=0, **settings)
    optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))
    return engram.posterior_of(optimizer, model, num_data=len(x))


def test_newton_has_the_hessian_of_laplace_and_its_rule(problem: Problem) -> None:
    ours = stepped(problem)
    fitted = engram.laplace(*problem, curvature="hessian", prior_precision=DELTA, progress=False)
    assert (ours.curvature, ours.exact) == (fitted.curvature, fitted.exact)
    assert (ours.curvature, ours.exact) == (Curvature.HESSIAN, True)
    one, other = (engram.sensitivities(*problem, p, progress=False) for p in (ours, fitted))
    assert one.basis.estimator == other.basis.estimator == "newton"
    torch.testing.assert_close(one.deviation, other.deviation, rtol=1e-8, atol=1e-12)


def test_a_group_is_left_out_of_newtons_precision_as_of_laplaces(problem: Problem) -> None:
    group = torch.arange(12)
    fitted = engram.laplace(*problem, curvature="hessian", prior_precision=DELTA, progress=False)
    one, other = (
        engram.remove(*problem, posterior, group, progress=False)
        for posterior in (stepped(problem), fitted)
    )
    for name, value in other.delta.items():
        torch.testing.assert_close(one.delta[name], value, rtol=1e-6, atol=1e-10)


def test_averages_and_samples_hold_no_example_as_it_stands(problem: Problem) -> None:
    assert not stepped(problem, OnlineNewton, precision_lr=0.5).exact
    sampled = stepped(problem, VON, precision_lr=0.5)
    assert (sampled.curvature, sampled.exact) == (Curvature.HESSIAN, False)
    model, (x, y) = problem
    gauss = Newton(
        model.parameters(), num_data=40, prior_precision=DELTA, curvature=GaussNewton("categorical")
    )
    gauss.step(lambda: (model(x), y))
    to_minimum(model, (x, y), DELTA)
    read = engram.posterior_of(gauss, model, num_data=40)
    assert (read.curvature, read.exact) == (Curvature.GGN, False)
    assert read.likelihood is not None
    assert read.likelihood.identity == engram.likelihoods.Categorical().identity


def test_the_verdict_tells_no_whole_matrix_to_use_a_richer_one(problem: Problem) -> None:
    calm = engram.sensitivities(*problem, stepped(problem), progress=False)
    strained = replace(calm, diagnostics=replace(calm.diagnostics, share_inconsistent=0.9))
    assert "richest" in repr(strained.verdict)
    diagonal = engram.laplace(*problem, structure="diagonal", prior_precision=DELTA, progress=False)
    calm = engram.sensitivities(*problem, diagonal, progress=False)
    strained = replace(calm, diagnostics=replace(calm.diagnostics, share_inconsistent=0.9))
    assert "Use a richer structure" in repr(strained.verdict)


def test_a_digest_is_of_all_numbers_and_facts(problem: Problem, tmp_path: Path) -> None:
    fitted = engram.laplace(*problem, structure="full", prior_precision=DELTA, progress=False)
    again = engram.laplace(*problem, structure="full", prior_precision=DELTA, progress=False)
    assert fitted.digest == again.digest
    assert engram.load(fitted.save(tmp_path)).digest == fitted.digest
    others = [
        replace(fitted, scale=2.0),
        replace(fitted, exact=True),
        replace(fitted, curvature=Curvature.FISHER),
        replace(fitted, num_data=41),
        replace(fitted, likelihood=Gaussian()),
        replace(fitted, prior_by_name={"0.weight": 1.0}),
        engram.laplace(*problem, structure="full", prior_precision=5.01, progress=False),
        engram.laplace(
            *problem, structure="full", prior_precision=DELTA, curvature="empirical", progress=False
        ),
    ]
    assert len({fitted.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_assess_refuses_another_posterior_of_the_same_name_and_prior(problem: Problem) -> None:
    common = {"structure": "full", "prior_precision": DELTA, "progress": False}
    fitted, other = (engram.laplace(*problem, curvature=c, **common) for c in ("ggn", "empirical"))
    result = engram.sensitivities(*problem, fitted, progress=False)
    assert result.basis.posterior_digest == fitted.digest
    with pytest.raises(engram.core.errors.ModelMismatchError, match="another one"):
        engram.assess(*problem, result, other, progress=False)


RECORDS = ("settings", "provenance")
OF_CALLS = {"call", "bound", "site"}  # the settings of a layer's call, not a record


def reads_a_record(node: ast.AST, tainted: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in RECORDS:
            owner = part.value.attr if isinstance(part.value, ast.Attribute) else part.value
            name = owner.id if isinstance(owner, ast.Name) else owner
            if name not in OF_CALLS:
                return True
        if isinstance(part, ast.Name) and part.id in tainted:
            return True
    return False


def decisions(function: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for part in ast.walk(function):
        if isinstance(part, ast.If | ast.While | ast.IfExp | ast.Assert):
            found.append(part.test)
        elif isinstance(part, ast.Compare | ast.BoolOp | ast.Match):
            found.append(part)
        elif isinstance(part, ast.comprehension):
            found += part.ifs
    return found


RECORDING = {"__repr__", "_merged", "sampled_sensitivities"}  # prints a record, or adds to it


def entries_read(function: ast.AST) -> list[ast.AST]:
    """``settings[...]`` and ``settings.get(...)``."""
    found: list[ast.AST] = []
    for part in ast.walk(function):
        if isinstance(part, ast.Subscript) or (
            isinstance(part, ast.Attribute) and part.attr == "get"
        ):
            found.append(part.value)
    return found


def test_no_code_decides_by_a_record() -> None:
    """Records are for the reader: printed, shown on pages and saved, and never asked."""
    wrong = []
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "demo" or path.name.endswith("page.py"):
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name in RECORDING:
                continue
            tainted = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and reads_a_record(node.value, set())
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            asked = decisions(function) + entries_read(function)
            if any(reads_a_record(test, tainted) for test in asked):
                wrong.append(f"{path.relative_to(SOURCE)}: {function.name}")
    assert wrong == []
