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

import torch
from torch import Tensor

from engram.core import equation
from engram.core.parameters import Named, inner
from engram.curvature.kinds import Curvature
from engram.curvature.operators import GaussNewton
from engram.engine.gradient_accumulator import DiscardGradients
from engram.linalg.cg import Limits, conjugate_gradients
from engram.posteriors.downdating import without_inputs
from engram.sensitivity.estimators import downdated, newton
from engram.sensitivity.estimators.base import Setting
from engram.sensitivity.estimators.corrected import corrected
from engram.sensitivity.exact_steps import TOLERANCE as OWN_TOLERANCE
from engram.sensitivity.exact_steps import own_limits, solve_without
from engram.sensitivity.group import DOUBLE_TOLERANCE, LARGEST_ITERATION, TOLERANCE, Group

FEW_PRODUCTS = 5  # with the training time: more took longer and were not nearer to the truth
OVERDRAWN = 1e-6  # negative eigenvalue of a factor over its largest: up to here it is rounding


class Matrix(str, Enum):
    """The matrix M that a step was taken with, as results print it."""

    ALL = "precision of all data"
    WITHOUT_GAUSS_NEWTON = "precision without the group's Gauss-Newton matrix"
    WITHOUT_HESSIAN = "precision without the group's Hessian"
    GAUSS_NEWTON = "exact Gauss-Newton matrix of the remaining data"
    STOPPED = "exact Gauss-Newton matrix of the remaining data with the training time"
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
        passes: forward and backward, over as many examples as the data has, where it is known.
    """

    delta: Named
    matrix: Matrix
    flagged: bool = False
    why: str = ""
    passes: float | None = None


def group_step(group: Group, rule: str) -> Step:
    """The step for a group, by one of ``STEPS``."""
    if rule in SINGLE and group.is_one_example:
        return SINGLE[rule](group)
    return STEPS[rule](group)


def _linear(group: Group) -> Step:
    gradient = group.gradient()
    delta = equation.mean_deviation(group.posterior.solve, gradient)
    return Step(delta, Matrix.ALL, group.outweighs(delta, gradient))


def _downdated(group: Group) -> Step:
    downdated.ESTIMATOR.check(group.posterior)
    remaining, lowest = without_inputs(group.posterior, group.inputs())
    delta = equation.mean_deviation(remaining.solve, group.gradient())
    # whole examples are in the factors, but for what was merged; larger weights need not be
    overdrawn = group.largest_share > 1 and lowest < -OVERDRAWN
    return Step(delta, Matrix.FACTORS, overdrawn)


def _corrected(group: Group) -> Step:
    posterior, gradient = group.posterior, group.gradient()
    if posterior.is_partial:
        return _gauss_newton(group, gradient, "the precision is known in some directions only")
    if posterior.is_dense and posterior.curvature is Curvature.HESSIAN:
        return _gauss_newton(group, gradient, "a Hessian need not stay positive definite")
    delta, flagged = group.solve_remaining(gradient)
    return Step(delta, Matrix.WITHOUT_GAUSS_NEWTON, flagged)


def _gauss_newton(group: Group, gradient: Named, why: str) -> Step:
    posterior, layout = group.posterior, group.layout
    prior = posterior.prior_vector
    exact = GaussNewton(
        group.opened, layout, prior, scale=posterior.scale, peers=group.opened.peers
    )
    whole = group.expected(exact)
    delta, flagged = group.solve_remaining(gradient, whole)
    return Step(delta, Matrix.GAUSS_NEWTON, flagged, why)


def _stopped_gauss_newton(group: Group) -> Step:
    r"""With the exact Gauss-Newton matrix of the rest and the training time, in a few products.

    .. math:: M = \sum_{i \notin M} J_i' \Lambda_i J_i + \delta + N C^{-1}

    Conjugate gradients that end early are a further regulariser: along what they have not seen the
    step is that of the preconditioner. At a minimum there is no training time, and they go on.
    """
    posterior, gradient = group.posterior, group.gradient()
    if posterior.training is None:
        return _gauss_newton(group, gradient, "")
    layout, right = group.layout, group.layout.flatten(gradient)[None]
    rest, examples = group.rest(posterior.prior_with_time, posterior.scale)

    def precondition(vectors: Tensor) -> Tensor:
        return posterior.solve_rows(vectors, layout)

    double = right.dtype == torch.float64
    limits = Limits(DOUBLE_TOLERANCE if double else TOLERANCE, FEW_PRODUCTS)
    found = conjugate_gradients(lambda v, *_: rest @ v, right, limits, precondition)
    seen = group.size + 2 * rest.products * examples
    passes = seen / group.opened.batches.num_data
    delta, bad = group.named(found.vectors), bool(found.indefinite[0])
    return Step(delta, Matrix.STOPPED, bad, passes=passes)


def _newton(group: Group) -> Step:
    """With the Hessian of the remaining data, where it leads no more than twice as far."""
    newton.ESTIMATOR.check(group.posterior)
    posterior, layout, gradient = group.posterior, group.layout, group.gradient()
    right = layout.flatten(gradient)[None]

    def own(vectors: Tensor, rows: Tensor) -> Tensor:
        return (group.hessian @ vectors.to(right)).to(vectors)

    limits = own_limits(posterior, right, LARGEST_ITERATION)
    solution = solve_without(posterior, own, right, limits)
    safe = _gauss_newton(group, gradient, "")
    step = layout.unflatten(solution.vectors[0])
    gain, largest = inner(gradient, step), newton.LARGEST_GAIN * inner(gradient, safe.delta)
    if bool(solution.indefinite[0]) or not float(solution.residual[0]) <= OWN_TOLERANCE:
        why = "the Hessian of the remaining data is not positive definite at these weights"
    elif 0 <= gain <= largest:
        return Step(step, Matrix.WITHOUT_HESSIAN)
    else:
        why = "the Hessian of the remaining data leads more than twice as far"
    return Step(safe.delta, safe.matrix, safe.flagged, why)


def _one_corrected(group: Group) -> Step:
    setting = _setting(group)
    for observed in group.opened.passes("example", group.parts[0].chosen):
        found = corrected(observed, setting)
        assert found.pull is not None
        pulled = group.opened.pull_back(observed.batch, found.pull, group.parameters)
        delta = group.posterior.solve(pulled)
        return Step(delta, Matrix.WITHOUT_GAUSS_NEWTON, bool(found.flagged[0]))
    raise AssertionError("one example was asked for")


def _one_newton(group: Group) -> Step:
    newton.ESTIMATOR.check(group.posterior)
    setting = _setting(group)
    for observed in group.opened.passes("example", group.parts[0].chosen):
        delta, taken, flagged = newton.newton_step(observed, setting)
        if taken:
            return Step(delta, Matrix.WITHOUT_HESSIAN, flagged)
        why = "without the example's Hessian nothing definite remains, or it leads too far"
        return Step(delta, Matrix.WITHOUT_GAUSS_NEWTON, flagged, why)
    raise AssertionError("one example was asked for")


def _setting(group: Group) -> Setting:
    likelihood = group.opened.likelihood
    return Setting(likelihood, group.posterior, 0, DiscardGradients(), opened=group.opened)


STEPS: dict[str, Callable[[Group], Step]] = {
    "linear": _linear,
    "corrected": _corrected,
    "newton": _newton,
    "downdated": _downdated,
    "gauss_newton": _stopped_gauss_newton,
}
SINGLE: dict[str, Callable[[Group], Step]] = {"corrected": _one_corrected, "newton": _one_newton}
