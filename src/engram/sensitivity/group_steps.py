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

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from engram.core import equation
from engram.core.dtypes import wide
from engram.core.parameters import Named, inner, trainable
from engram.core.selection import spread
from engram.curvature.kinds import Curvature
from engram.curvature.operators import (
    CurvatureOperator,
    GaussNewton,
    Hessian,
    TangentGaussNewton,
    Weighted,
)
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.session import Session
from engram.engine.sites import is_rank_one, matrix_blocks
from engram.linalg.cg import Limits, conjugate_gradients
from engram.posteriors.downdating import without_inputs
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators import downdated, newton
from engram.sensitivity.estimators.base import Setting
from engram.sensitivity.estimators.corrected import corrected
from engram.sensitivity.exact_steps import TOLERANCE as OWN_TOLERANCE
from engram.sensitivity.exact_steps import own_limits, solve_without

# Solves without a group's Gauss-Newton matrix, by conjugate gradients
LARGEST_ITERATION = 200  # products with the matrix, a pass over the group each
DOUBLE_TOLERANCE = 1e-14  # relative residual at which they end: who uses double wants equality
TOLERANCE = 10**-4.5  # the same in single precision, or where the precision is known in part
SHORTEST = 1e-30  # training time that is told from none
FEW_PRODUCTS = 5  # with the training time: more took longer and were not nearer to the truth
PRODUCT_SAMPLE = 2048  # remaining examples that such products are over: 750 of 3000 did as well
GOOD_ENOUGH = 1e-3  # relative residual up to which a step that has not ended is not flagged
# What must remain of a precision without a group for its step to be trusted
SHARE_OF_PRIOR = 0.01  # of the prior's precision, in every direction
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


class Group:
    """The examples that are left out: their weighted gradient, curvature and inputs."""

    def __init__(
        self, opened: Session, posterior: Posterior, chosen: Tensor, weights: Tensor
    ) -> None:
        self.opened, self.posterior = opened, posterior
        # in one order, so that the order they are named in does not matter
        self.chosen, order = chosen.sort()
        self.weight_of = dict(zip(self.chosen.tolist(), weights[order].tolist(), strict=True))
        self.layout = posterior.layout
        parameters = trainable(opened.model)
        self.parameters = {name: parameters[name] for name in self.layout.names}
        self.weighted = Weighted(self.chosen, weights[order])

    @property
    def largest_share(self) -> float:
        """The largest weight eps of any example of the group."""
        return max(self.weight_of.values())

    def outweighs(self, step: Named, gradient: Named) -> bool:
        """Whether weights beyond 1 have more curvature along the step S^-1 g than all data.

        Then a first-order step says nothing: the group's own curvature is what it leaves out. With
        overflow there is no telling, and that is a yes.
        """
        if max(abs(weight) for weight in self.weight_of.values()) <= 1:
            return False
        along = self.layout.flatten({name: step[name] for name in self.layout.names})
        own = float((wide(along) * wide(self.gauss_newton @ along[None])).sum())
        whole = inner(step, gradient)
        return not abs(own) <= whole < math.inf

    def _weights(self, indices: Tensor, like: Tensor) -> Tensor:
        return torch.tensor([self.weight_of[int(i)] for i in indices], dtype=torch.float64).to(
            like
        )[:, None]

    def gradient(self) -> Named:
        """sum_j eps_j grad loss_j."""
        total = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        for observed in self.opened.passes("gradient of the group", self.chosen):
            seed = self._weights(observed.batch.indices, observed.residual) * observed.residual
            for name, value in self.opened.pull_back(observed.batch, seed, self.parameters).items():
                total[name] += value
        return total

    def sampled_rest(self) -> Weighted:
        """The remaining examples, or some that stand for all; of the group, what is left in."""
        share = torch.ones(self.opened.batches.num_data, dtype=torch.float64)
        share[self.chosen] -= self.weighted.weights.double()
        rest = share.nonzero()[:, 0]
        places = spread(len(rest), PRODUCT_SAMPLE) if len(rest) else rest
        scale = len(rest) / max(1, len(places))
        return Weighted(rest[places], scale * share[rest[places]])

    @cached_property
    def gauss_newton(self) -> TangentGaussNewton:
        """sum_j eps_j J_j' Lambda_j J_j."""
        return TangentGaussNewton(self.opened, self.layout, examples=self.weighted)

    def inputs(self) -> dict[tuple[str, ...], Tensor]:
        """sum_j eps_j c_j c_j' of every Kronecker block whose layer acts at one position, [I, I].

        Where a layer acts at many positions, factors are left as they are, as for single examples.
        """
        total: dict[tuple[str, ...], Tensor] = {}
        for observed in self.opened.passes("inputs of the group", self.chosen):
            for site in observed.trace.sites:
                block = self.posterior.block_of.get(site.names[0])
                if block is None or not block.knows_inputs:
                    continue
                if not is_rank_one(site, matrix_blocks([block])):
                    continue
                columns = wide(site.call.input.reshape(len(observed.outputs), -1))
                if len(block.names) == 2:
                    columns = torch.cat([columns, torch.ones_like(columns[:, :1])], dim=1)
                weights = self._weights(observed.batch.indices, columns)
                square = columns.mT @ (weights * columns)
                total[block.names] = total.get(block.names, 0) + square
        return total

    def solve_remaining(
        self, gradient: Named, whole: CurvatureOperator | None = None
    ) -> tuple[Named, bool]:
        """(W - the group's Gauss-Newton matrix)^-1 g, and whether not to trust it.

        Where what remains has hardly any curvature in some direction, the solution so far is
        returned and flagged: never an exploding number.

        Args:
            gradient: g.
            whole: W; the precision itself if not given.
        """
        posterior, right = self.posterior, self.layout.flatten(gradient)[None]
        first = posterior.solve_rows(right, self.layout)
        if not math.isfinite(float((wide(first) * wide(right)).sum())):
            return self._named(first), True  # weights so large that their squares overflow
        double = right.dtype == torch.float64 and not posterior.is_partial
        # whatever data remains, the precision should not fall far below the prior's
        smallest = SHARE_OF_PRIOR * min(posterior.prior_of(name) for name in gradient)
        limits = Limits(DOUBLE_TOLERANCE if double else TOLERANCE, LARGEST_ITERATION, smallest)
        found = solve_without(posterior, lambda v, _: self.gauss_newton @ v, right, limits, whole)
        if not found.vectors.any() and bool(found.indefinite[0]):
            return self._named(first), True
        bad = bool(found.indefinite[0]) or not float(found.residual[0]) <= GOOD_ENOUGH
        return self._named(found.vectors), bad

    def _named(self, rows: Tensor) -> Named:
        return {name: value[0] for name, value in self.layout.unflatten(rows).items()}


def group_step(
    opened: Session, posterior: Posterior, chosen: Tensor, weights: Tensor, rule: str
) -> Step:
    """The step for a group, by one of ``STEPS``."""
    group = Group(opened, posterior, chosen, weights)
    if rule in SINGLE and len(chosen) == 1 and float(weights[0]) == 1:
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
    whole = GaussNewton(group.opened, layout, prior, scale=posterior.scale)
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
    times = {name: posterior.training.time[name] for name in layout.names}
    whole = {name: time.expand(group.parameters[name].shape) for name, time in times.items()}
    prior = posterior.prior_vector + posterior.num_data / layout.flatten(
        whole
    ).double().cpu().clamp(min=SHORTEST)
    examples = group.sampled_rest()
    rest = GaussNewton(group.opened, layout, prior, examples, posterior.scale)

    def precondition(vectors: Tensor) -> Tensor:
        return posterior.solve_rows(vectors, layout)

    double = right.dtype == torch.float64
    limits = Limits(DOUBLE_TOLERANCE if double else TOLERANCE, FEW_PRODUCTS)
    found = conjugate_gradients(lambda v, *_: rest @ v, right, limits, precondition)
    seen = len(group.chosen) + 2 * rest.products * len(examples.indices)
    passes = seen / group.opened.batches.num_data
    delta, bad = group._named(found.vectors), bool(found.indefinite[0])
    return Step(delta, Matrix.STOPPED, bad, passes=passes)


def _newton(group: Group) -> Step:
    """With the Hessian of the remaining data, where it leads no more than twice as far."""
    newton.ESTIMATOR.check(group.posterior)
    posterior, layout, gradient = group.posterior, group.layout, group.gradient()
    right = layout.flatten(gradient)[None]
    hessian = Hessian(group.opened, layout, examples=group.weighted)

    def own(vectors: Tensor, rows: Tensor) -> Tensor:
        return (hessian @ vectors.to(right)).to(vectors)

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
    for observed in group.opened.passes("example", group.chosen):
        found = corrected(observed, setting)
        assert found.pull is not None
        pulled = group.opened.pull_back(observed.batch, found.pull, group.parameters)
        delta = group.posterior.solve(pulled)
        return Step(delta, Matrix.WITHOUT_GAUSS_NEWTON, bool(found.flagged[0]))
    raise AssertionError("one example was asked for")


def _one_newton(group: Group) -> Step:
    newton.ESTIMATOR.check(group.posterior)
    setting = _setting(group)
    for observed in group.opened.passes("example", group.chosen):
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
