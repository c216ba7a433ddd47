r"""Newton's method for a penalised sum of losses of linear predictors.

.. math:: \theta \leftarrow \theta - t\, S^{-1} \nabla F, \qquad
    F = \sum_i w_i \ell_i(x_i'\theta + o_i) + \tfrac12 \theta' D \theta

S is the Hessian of F; where it is not positive definite, as can happen far from the minimum with a
link that is not canonical, its expectation over targets (Fisher scoring). The step t is halved
until F falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from engram.errors import PosteriorError
from engram.likelihoods import Likelihood
from engram.models.glm.design import Design, check_rank
from engram.models.glm.factor import Factor, factorise

LARGEST_ITERATION = 100  # Newton steps: a dozen are usual, more mean that there is no minimum
HALVINGS = 40  # of a step: what is left then is below rounding
SUFFICIENT = 1e-4  # share of the decrease that Newton predicts (Armijo's rule): small, so that any
# step that lowers F at all is taken
# decreases of F, relative to F
TOLERANCE = 1e-13  # expected of a step that is the last; it is taken all the same
ROUNDING = 1e-13  # by which F may rise: sums of many losses are no better
SETTLED = 1e-8  # expected where no step lowers F: below, only rounding is left and it has converged


@dataclass(frozen=True, eq=False)
class Objective:
    """F, for a likelihood at dispersion 1."""

    design: Design
    likelihood: Likelihood
    targets: Tensor

    @cached_property
    def unit(self) -> float:
        """What a change of F is small against where F itself may vanish."""
        return min(1.0, float(self.design.weights.sum()))

    def value(self, coefficients: Tensor, outputs: Tensor) -> float:
        """F, infinite where a mean leaves its support."""
        if not bool(self.likelihood.inside(outputs).all()):
            return math.inf
        used = self.design.weights > 0
        losses = (self.design.weights * self.likelihood.fitted(outputs, self.targets))[used].sum()
        penalty = 0.5 * (self.design.penalty * coefficients.square()).sum()
        value = float(losses + penalty)
        return value if math.isfinite(value) else math.inf

    def gradient(self, coefficients: Tensor, outputs: Tensor) -> Tensor:
        """dF / d theta, [K, P]."""
        residual = self.design.weights[:, None] * self.likelihood.residual(outputs, self.targets)
        return self.design.pull_back(residual) + self.design.penalty * coefficients

    def factor(self, outputs: Tensor, expected: bool = False) -> Factor | None:
        """The root of S, or None where S is not positive definite."""
        likelihood = self.likelihood.at(1.0, expected) if expected else self.likelihood
        hessian = likelihood.output_hessian(outputs, self.targets)
        return factorise(self.design, hessian, likelihood.shift_invariant)


@dataclass(frozen=True, eq=False)
class Minimum:
    """Where Newton's method came to."""

    objective: Objective
    coefficients: Tensor
    converged: bool
    iterations: int
    scored: int  # iterations that used the expected Hessian


def minimise(objective: Objective, start: Tensor) -> Minimum:
    """From start [K, P] to the minimum, or as far as it goes."""
    coefficients, scored = start, 0
    outputs = objective.design.outputs(coefficients)
    value = objective.value(coefficients, outputs)
    for iteration in range(LARGEST_ITERATION):
        gradient = objective.gradient(coefficients, outputs).reshape(-1)
        factor = objective.factor(outputs)
        if factor is None:
            factor, scored = objective.factor(outputs, expected=True), scored + 1
        if factor is None:
            check_rank(objective.design)
            return Minimum(objective, coefficients, False, iteration, scored)
        step = -factor.solve(gradient[None])[0]
        decrease = -float(gradient @ step)
        moved = _descend(objective, coefficients, step.reshape(start.shape), value, decrease)
        if moved is None:
            settled = decrease <= SETTLED * (objective.unit + abs(value))
            return Minimum(objective, coefficients, settled, iteration, scored)
        coefficients, outputs, value = moved
        if decrease <= TOLERANCE * (objective.unit + abs(value)):
            return Minimum(objective, coefficients, True, iteration + 1, scored)
    return Minimum(objective, coefficients, False, LARGEST_ITERATION, scored)


def _descend(
    objective: Objective, coefficients: Tensor, step: Tensor, value: float, decrease: float
) -> tuple[Tensor, Tensor, float] | None:
    """The first of the halved steps that lowers F."""
    rounding = ROUNDING * (objective.unit + abs(value))
    share = 1.0
    for _ in range(HALVINGS):
        moved = coefficients + share * step
        outputs = objective.design.outputs(moved)
        reached = objective.value(moved, outputs)
        if reached <= value - SUFFICIENT * share * decrease + rounding:
            return moved, outputs, reached
        share /= 2
    return None


def starting_point(objective: Objective) -> Tensor:
    """Least squares on the link of means near the targets; zero for softmax."""
    design, likelihood = objective.design, objective.likelihood
    width = design.width
    eta = likelihood.starting_outputs(objective.targets)
    if eta is None:
        return design.body.new_zeros(objective.targets.shape[1], width)
    hessian = likelihood.at(1.0, expected_hessian=True).output_hessian(eta, objective.targets)
    factor = factorise(design, hessian, likelihood.shift_invariant)
    if factor is None:
        check_rank(design)
        raise PosteriorError(
            "a design that determines the coefficients",
            "a precision that is not positive definite",
            "use penalty > 0",
        )
    shares = design.weights[:, None] * hessian[:, :, 0]
    for scale in (1.0, 0.0):  # the fit may leave the support, the mean cannot
        target = scale * eta + (1 - scale) * (shares * eta).sum() / shares.sum()
        right = design.pull_back(shares * (target - design.offset))
        start = factor.solve(right)
        if math.isfinite(objective.value(start, design.outputs(start))):
            return start
    raise PosteriorError(
        f"a starting point at which all means lie in the support of {likelihood!r}",
        "none from least squares, nor from a constant",
        "give an intercept, or use a link that keeps means inside, such as log",
    )
