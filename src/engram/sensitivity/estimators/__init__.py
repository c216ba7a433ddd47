"""The estimators by name: one a file, all of the same shape; a new one is a file and one line here.

With the prediction variance V, the residual e, the output Hessian L and the precision S:

- ``linear``: d = V e, the precision of all data;
- ``corrected``: d = (I - V L)^-1 V e, without the example's Gauss-Newton matrix;
- ``iterated``: d <- V e(f + d), the residual of the left-out prediction;
- ``paper``: d = diag(V) e with predictions linearised, as the authors compute;
- ``newton``: d = J (S - H_i)^-1 g_i, without the example's Hessian, where S is the exact one;
- ``downdated``: d = J S_-i^-1 g_i, with Kronecker factors of the remaining data;
- ``trajectory``: the difference of two trainings, with and without it, along the record.
"""

from __future__ import annotations

from collections.abc import Sequence

from engram.core.arguments import AUTO, is_auto, one_of
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators import (
    corrected,
    downdated,
    iterated,
    linear,
    newton,
    paper,
    trajectory,
)
from engram.sensitivity.estimators.base import Estimator

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        linear.ESTIMATOR,
        corrected.ESTIMATOR,
        iterated.ESTIMATOR,
        paper.ESTIMATOR,
        newton.ESTIMATOR,
        downdated.ESTIMATOR,
        trajectory.ESTIMATOR,
    )
}
FROM_VARIANCE = tuple(name for name, rule in ESTIMATORS.items() if rule.from_variance)


def check_estimator(name: object, among: Sequence[str] = (AUTO, *ESTIMATORS)) -> None:
    """ArgumentError for a rule that is not known."""
    one_of("estimator", name, among, f'use "{among[0]}"')


def chosen_estimator(name: str, posterior: Posterior) -> str:
    """The rule for single examples that is asked for; with ``"auto"`` the posterior's own.

    ``trajectory`` where checkpoints were recorded, else that of the end of training.
    """
    if not is_auto(name):
        return name
    walks = trajectory.ESTIMATOR.fits(posterior)
    return trajectory.ESTIMATOR.name if walks else default_estimator(posterior)


def default_estimator(posterior: Posterior) -> str:
    """Which rule at the end of training a posterior gets where none is asked for.

    ``newton`` with the exact Hessian, ``downdated`` with Kronecker factors, ``corrected`` with
    another dense precision, else ``linear``: what is subtracted from an approximate precision may
    not be in it, and leaves nothing sensible.
    """
    for estimator in (newton.ESTIMATOR, downdated.ESTIMATOR):
        if estimator.fits(posterior):
            return estimator.name
    return "corrected" if posterior.is_dense else "linear"
