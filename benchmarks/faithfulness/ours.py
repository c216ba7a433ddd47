"""engram's own estimates."""

from __future__ import annotations

from functools import lru_cache, partial

import engram
from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

DEFAULT = "engram, no options"
ROUNDS = 5


def default(problem: Problem) -> Estimate:
    """What a user gets who says nothing but how strong the regulariser was."""
    posterior = engram.laplace(
        problem.model, problem.data, prior_precision=problem.prior_precision, progress=False
    )
    return _sensitivities(problem, posterior)


def chosen(problem: Problem, structure: str, estimator: str, curvature: str = "ggn") -> Estimate:
    """A structure and an estimator by name."""
    posterior = _posterior(problem, structure, curvature)
    return _sensitivities(problem, posterior, estimator=estimator, rounds=ROUNDS)


@lru_cache(maxsize=1)
def _posterior(problem: Problem, structure: str, curvature: str) -> engram.Posterior:
    """Rows that follow each other and differ in the estimator only share it."""
    return engram.laplace(
        problem.model,
        problem.data,
        structure=structure,
        curvature=curvature,
        prior_precision=problem.prior_precision,
        progress=False,
    )


def _sensitivities(problem: Problem, posterior: engram.Posterior, **options: object) -> Estimate:
    """Of the left-out examples only: an example's estimate does not depend on the others."""
    left_out = problem.inputs[problem.left_out], problem.targets[problem.left_out]
    return Estimate.of_result(
        engram.sensitivities(problem.model, left_out, posterior, progress=False, **options)
    )


METHODS: dict[str, Method] = {
    DEFAULT: default,
    **{
        f"engram, {structure}, {estimator}": partial(
            chosen, structure=structure, estimator=estimator
        )
        for structure, estimator in (
            ("full", "corrected"),
            ("full", "iterated"),
            ("kronecker", "linear"),
            ("ekfac", "linear"),
            ("diagonal", "linear"),
        )
    },
    **{
        f"engram, full Hessian, {estimator}": partial(
            chosen, structure="full", estimator=estimator, curvature="hessian"
        )
        for estimator in ("linear", "corrected", "iterated")
    },
}
