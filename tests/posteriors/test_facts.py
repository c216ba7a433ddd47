"""What decides about a posterior is a field of it, the same whoever fitted it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.curvature.kinds import Curvature
from engram.likelihoods import Gaussian
from engram.optimizers import VON, GaussNewton, Newton, OnlineNewton
from engram.trust.thresholds import CONSISTENCY, NO_RICHER
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
    assert NO_RICHER in {reason.remedy for reason in strained.verdict.reasons}
    diagonal = engram.laplace(*problem, structure="diagonal", prior_precision=DELTA, progress=False)
    calm = engram.sensitivities(*problem, diagonal, progress=False)
    strained = replace(calm, diagnostics=replace(calm.diagnostics, share_inconsistent=0.9))
    assert CONSISTENCY.remedy in {reason.remedy for reason in strained.verdict.reasons}


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
    with pytest.raises(engram.errors.ModelMismatchError, match="another one"):
        engram.assess(*problem, result, other, progress=False)
