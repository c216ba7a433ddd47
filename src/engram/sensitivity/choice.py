"""Which rule a posterior gets where none is asked for: one answer, for examples and for groups."""

from __future__ import annotations

from engram.posteriors.downdating import can_be_downdated
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators import default_estimator
from engram.sensitivity.newton import has_own_hessians

NEWTON, DOWNDATED = "newton", "downdated"


def default_rule(posterior: Posterior) -> str:
    """``newton`` with the exact Hessian, ``downdated`` with Kronecker factors, else the usual."""
    if has_own_hessians(posterior):
        return NEWTON
    return DOWNDATED if can_be_downdated(posterior) else default_estimator(posterior)
