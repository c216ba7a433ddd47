r"""The step of the parameters when a group is left out, and the matrix that it was taken with.

.. math:: \Delta\theta = M^{-1} \sum_j \epsilon_j \nabla \ell_j

One example is answered as in :func:`engram.sensitivities`, by the same rules: M is the precision
(``linear``), the precision without the example's Gauss-Newton matrix (``corrected``) or without its
Hessian (``newton``), or has Kronecker factors without it (``downdated``). For a group the sums
over its examples take their place. Without many examples the Hessian at the present weights
need not be positive definite, and without their Gauss-Newton part alone even less so: then M is
the exact Gauss-Newton matrix of the remaining data, which always is, and the step says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from engram.core import equation
from engram.core.parameters import Named, inner
from engram.curvature.kinds import Curvature
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.session import Session
from engram.posteriors.downdating import without_inputs
from engram.posteriors.gaussian import Posterior
from engram.posteriors.trace_estimation import covered_layout
from engram.sensitivity.estimators import downdated, newton
from engram.sensitivity.estimators.base import Setting
from engram.sensitivity.estimators.corrected import corrected
from engram.sensitivity.newton import TOLERANCE, solve_without
from engram.sensitivity.remaining import LARGEST_ITERATION, LeftOut, has_low_rank

OVERDRAWN = 1e-6  # of the largest eigenvalue of a factor


class Matrix(str, Enum):
    """M, in words."""

    ALL = "precision of all data"
    WITHOUT_GAUSS_NEWTON = "precision without the group's Gauss-Newton matrix"
    WITHOUT_HESSIAN = "precision without the group's Hessian"
    GAUSS_NEWTON = "exact Gauss-Newton matrix of the remaining data"
    FACTORS = "Kronecker factors of the remaining data"

    __str__ = str.__str__


@dataclass(frozen=True)
class Step:
    """A step of the parameters.

    Args:
        delta: by name.
        matrix: that it was taken with.
        flagged: whether a guard held, so that the step is not to be believed.
        why: why it is not the matrix of the rule's own name; empty where it is.
    """

    delta: Named
    matrix: Matrix
    flagged: bool = False
    why: str = ""


def group_step(
    opened: Session, posterior: Posterior, chosen: Tensor, shares: Tensor, rule: str
) -> Step:
    """The step for a group, by one of ``STEPS``."""
    group = LeftOut(opened, posterior, chosen, shares)
    if rule in SINGLE and len(chosen) == 1 and float(shares[0]) == 1:
        return SINGLE[rule](group)
    return STEPS[rule](group)


def _linear(group: LeftOut) -> Step:
    gradient = group.gradient()
    delta = equation.mean_deviation(group.posterior.solve, gradient)
    return Step(delta, Matrix.ALL, group.outweighs(delta, gradient))


def _downdated(group: LeftOut) -> Step:
    downdated.ESTIMATOR.check(group.posterior)
    remaining, lowest = without_inputs(group.posterior, group.inputs())
    delta = equation.mean_deviation(remaining.solve, group.gradient())
    # whole examples are in the factors, but for what was merged; larger shares need not be
    overdrawn = group.largest_share > 1 and lowest < -OVERDRAWN
    return Step(delta, Matrix.FACTORS, overdrawn)


def _corrected(group: LeftOut) -> Step:
    posterior, gradient = group.posterior, group.gradient()
    if has_low_rank(posterior):
        return _gauss_newton(group, gradient, "the precision is known in some directions only")
    if posterior.is_dense and posterior.curvature is Curvature.HESSIAN:
        return _gauss_newton(group, gradient, "a Hessian need not stay positive definite")
    delta, flagged = group.solve_remaining(posterior.multiply, gradient)
    return Step(delta, Matrix.WITHOUT_GAUSS_NEWTON, flagged)


def _gauss_newton(group: LeftOut, gradient: Named, why: str) -> Step:
    delta, flagged = group.solve_remaining(group.all_gauss_newton_times, gradient)
    return Step(delta, Matrix.GAUSS_NEWTON, flagged, why)


def _newton(group: LeftOut) -> Step:
    """With the Hessian of the remaining data, where it leads no more than twice as far."""
    newton.ESTIMATOR.check(group.posterior)
    layout, gradient = covered_layout(group.posterior), group.gradient()
    right = layout.flatten(gradient)[None]

    def own(vectors: Tensor, rows: Tensor) -> Tensor:
        found = group.hessian_times(layout.unflatten(vectors[0].to(right)))
        return layout.flatten(found)[None].to(vectors)

    solution = solve_without(group.posterior, own, right, LARGEST_ITERATION)
    safe = _gauss_newton(group, gradient, "")
    step = layout.unflatten(solution.vectors[0])
    gain, largest = inner(gradient, step), newton.LARGEST_GAIN * inner(gradient, safe.delta)
    if bool(solution.indefinite[0]) or not float(solution.residual[0]) <= TOLERANCE:
        why = "the Hessian of the remaining data is not positive definite at these weights"
    elif 0 <= gain <= largest:
        return Step(step, Matrix.WITHOUT_HESSIAN)
    else:
        why = "the Hessian of the remaining data leads more than twice as far"
    return Step(safe.delta, safe.matrix, safe.flagged, why)


def _one_corrected(group: LeftOut) -> Step:
    setting = _setting(group)
    for observed in group.opened.passes("example", group.chosen):
        found = corrected(observed, setting)
        assert found.pull is not None
        pulled = group.opened.pull_back(observed.batch, found.pull, group.parameters)
        delta = group.posterior.solve(pulled)
        return Step(delta, Matrix.WITHOUT_GAUSS_NEWTON, bool(found.flagged[0]))
    raise AssertionError("one example was asked for")


def _one_newton(group: LeftOut) -> Step:
    newton.ESTIMATOR.check(group.posterior)
    setting = _setting(group)
    for observed in group.opened.passes("example", group.chosen):
        delta, taken, flagged = newton.newton_step(observed, setting)
        if taken:
            return Step(delta, Matrix.WITHOUT_HESSIAN, flagged)
        why = "without the example's Hessian nothing definite remains, or it leads too far"
        return Step(delta, Matrix.WITHOUT_GAUSS_NEWTON, flagged, why)
    raise AssertionError("one example was asked for")


def _setting(group: LeftOut) -> Setting:
    likelihood = group.opened.likelihood
    return Setting(likelihood, group.posterior, 0, DiscardGradients(), opened=group.opened)


STEPS: dict[str, Callable[[LeftOut], Step]] = {
    "linear": _linear,
    "corrected": _corrected,
    "newton": _newton,
    "downdated": _downdated,
}
SINGLE: dict[str, Callable[[LeftOut], Step]] = {"corrected": _one_corrected, "newton": _one_newton}
