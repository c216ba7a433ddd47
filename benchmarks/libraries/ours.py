"""engram: Kronecker factors with sampled labels, at the end and along the record."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from torch import Tensor

import engram
from benchmarks.libraries.case import Case, Way

ALONG = "along the record"  # how the title of a way ends that needs one
QUIET: dict[str, Any] = {"progress": False}


def fitted(case: Case, structure: str = "kronecker", curvature: str = "fisher") -> engram.Posterior:
    """From the record where there is one."""
    return engram.laplace(
        case.model,
        case.train,
        likelihood=case.likelihood,
        structure=structure,
        curvature=curvature,
        prior_precision="auto" if case.prior_precision is None else case.prior_precision,
        training=case.training,
        batch_size=case.batch_size,
        **QUIET,
    )


def passed(case: Case, posterior: engram.Posterior) -> engram.Result:
    """One pass, diagnostics included."""
    return engram.sensitivities(
        case.model,
        case.train,
        posterior,
        estimator="linear",
        batch_size=case.batch_size,
        **QUIET,
    )


def own(case: Case, structure: str) -> Tensor:
    """A fit and a pass: deviations, losses without the example, leverages of some, a verdict."""
    return passed(case, fitted(case, structure)).deviation


@lru_cache(maxsize=1)
def _kept(case: Case) -> engram.Posterior:
    return fitted(case)


def pass_alone(case: Case) -> Tensor:
    """With the posterior of an earlier call on this case."""
    return passed(case, _kept(case)).deviation


def pairs(case: Case, structure: str, curvature: str, estimator: str) -> Tensor:
    """The growth of a test example's loss when the training example is left out."""
    if estimator == "trajectory" and case.training is None:
        raise ValueError("the training was not recorded")
    posterior = fitted(case, structure, curvature)
    return engram.influence(
        case.model, case.train, case.test, posterior, estimator=estimator, **QUIET
    )


OWN: dict[str, Way] = {
    "engram, Kronecker": partial(own, structure="kronecker"),
    "engram, Kronecker, posterior at hand": pass_alone,
    "engram, diagonal": partial(own, structure="diagonal"),
}
PAIRS: dict[str, Way] = {
    "engram, Kronecker": partial(
        pairs, structure="kronecker", curvature="fisher", estimator="linear"
    ),
    "engram, EK-FAC": partial(pairs, structure="ekfac", curvature="fisher", estimator="linear"),
    f"engram, Kronecker, {ALONG}": partial(
        pairs, structure="kronecker", curvature="fisher", estimator="trajectory"
    ),
}
