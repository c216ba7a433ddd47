"""engram's own estimates."""

from __future__ import annotations

from functools import lru_cache, partial

import engram
from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem
from engram.core.data.batches import Batches
from engram.posteriors.laplace import default_structure

DEFAULT = "engram, no options"
KRONECKER = "engram, kronecker, downdated"
REFINED = "engram, no options, refined by retraining"
ROUNDS = 5


def default(problem: Problem) -> Estimate:
    """What a user gets who says nothing but how strong the regulariser was."""
    return _sensitivities(problem, _posterior(problem))


def refined(problem: Problem) -> Estimate:
    """The same for all examples, then ``refine`` on those that it chooses itself."""
    if problem.regime != "converged":
        raise ValueError("the built-in recipe trains to the end, and this net was stopped early")
    posterior = _posterior(problem)
    result = engram.sensitivities(problem.model, problem.data, posterior, progress=False)
    result = engram.refine(
        problem.model, problem.data, result, posterior, method="retrain", progress=False
    )
    chosen = problem.left_out
    increase = (result.loo_loss - result.loss)[chosen]
    return Estimate(result.score[chosen], increase, result.deviation[chosen])


def calibrated(problem: Problem, structure: str) -> Estimate:
    """A structure scaled by ``calibrate``, with the rule that goes with it."""
    posterior = engram.calibrate(
        problem.model, problem.data, _posterior(problem, structure), progress=False
    )
    return _sensitivities(problem, posterior, estimator="corrected")


def chosen(problem: Problem, structure: str, estimator: str, curvature: str = "auto") -> Estimate:
    """A structure and an estimator by name; the full matrix only where it takes seconds."""
    if structure == "full" and default_structure(problem.model, Batches(problem.data, 1)) != "full":
        raise ValueError("the full matrix of so many parameters takes more than seconds")
    posterior = _posterior(problem, structure, curvature)
    return _sensitivities(problem, posterior, estimator=estimator, rounds=ROUNDS)


@lru_cache(maxsize=1)
def _posterior(
    problem: Problem, structure: str = "auto", curvature: str = "auto"
) -> engram.Posterior:
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
    REFINED: refined,
    KRONECKER: partial(chosen, structure="kronecker", estimator="downdated"),
    "engram, kronecker, linear": partial(chosen, structure="kronecker", estimator="linear"),
    "engram, kronecker, calibrated": partial(calibrated, structure="kronecker"),
    **{
        f"engram, {structure}, {estimator}": partial(
            chosen, structure=structure, estimator=estimator
        )
        for structure, estimator in (
            ("ekfac", "linear"),
            ("diagonal", "linear"),
            ("full", "corrected"),
            ("full", "iterated"),
        )
    },
    "engram, full Hessian, corrected": partial(
        chosen, structure="full", estimator="corrected", curvature="hessian"
    ),
}
