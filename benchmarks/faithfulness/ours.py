"""engram's own estimates."""

from __future__ import annotations

from functools import lru_cache, partial

import engram
from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

DEFAULT = "engram, no options"
KRONECKER = "engram, kronecker, linear"
REFINED = "engram, no options, refined by retraining"
ROUNDS = 5


def default(problem: Problem) -> Estimate:
    """What a user gets who says nothing but how strong the regulariser was."""
    return _sensitivities(problem, _posterior(problem, None, None))


def refined(problem: Problem, method: str) -> Estimate:
    """The same for all examples, then ``refine`` on those that it chooses itself."""
    if method == "retrain" and problem.regime != "converged":
        raise ValueError("needs the caller's own training where that was stopped early")
    posterior = _posterior(problem, None, None)
    result = engram.refine(
        problem.model,
        problem.data,
        _everything(problem),
        posterior,
        method=method,
        progress=False,
    )
    chosen = problem.left_out
    increase = (result.loo_loss - result.loss)[chosen]
    return Estimate(result.score[chosen], increase, result.deviation[chosen])


@lru_cache(maxsize=1)
def _everything(problem: Problem) -> engram.Result:
    """Of all examples, which ``refine`` chooses from."""
    posterior = _posterior(problem, None, None)
    return engram.sensitivities(problem.model, problem.data, posterior, progress=False)


def calibrated(problem: Problem, structure: str) -> Estimate:
    """A structure scaled by ``calibrate``, with the rule that goes with it."""
    posterior = engram.calibrate(
        problem.model, problem.data, _posterior(problem, structure, None), progress=False
    )
    return _sensitivities(problem, posterior, estimator="corrected")


def chosen(
    problem: Problem, structure: str, estimator: str, curvature: str | None = None
) -> Estimate:
    """A structure and an estimator by name."""
    posterior = _posterior(problem, structure, curvature)
    return _sensitivities(problem, posterior, estimator=estimator, rounds=ROUNDS)


@lru_cache(maxsize=1)
def _posterior(problem: Problem, structure: str | None, curvature: str | None) -> engram.Posterior:
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
    "engram, no options, refined by solving": partial(refined, method="solve"),
    REFINED: partial(refined, method="retrain"),
    KRONECKER: partial(chosen, structure="kronecker", estimator="linear"),
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
    **{
        f"engram, full Hessian, {estimator}": partial(
            chosen, structure="full", estimator=estimator, curvature="hessian"
        )
        for estimator in ("linear", "corrected", "iterated", "newton")
    },
}
