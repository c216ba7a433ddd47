r"""Separation: targets that a hyperplane tells apart have no maximum-likelihood coefficients.

A direction b in which no example's loss ever rises and some example's falls without end makes the
likelihood grow for ever. Whether there is one is a linear programme: maximise the sum of margins
:math:`m_i(b) \ge 0` over :math:`|b_p| \le 1`.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from torch import Tensor

from engram.core.errors import SeparationError
from engram.likelihoods import Categorical, ElementwiseLikelihood
from engram.models.glm.newton import Objective

FAR = 3.0  # linear predictors beyond this are looked at: a probit is flat from 6 on
FLAT = 1e-6  # curvature along a column, relative to that of a loss of curvature 1
FAR_STOPPED = 4.0  # other libraries stop on their way to infinity,
MOVING = 0.05  # where one more Newton step moves some predictor by a constant
TIME_LIMIT = 60.0  # seconds of a linear programme; beyond, separation stays undetected
ADVICE = (
    "use penalty > 0, which makes the coefficients finite; or drop the columns named, or merge "
    "categories"
)


def check_one_class(objective: Objective) -> None:
    """SeparationError if no finite intercept is best: one class, or counts that are all 0."""
    design = objective.design
    if not design.ones or design.penalty[0] > 0:
        return
    used = objective.targets[design.weights > 0]
    if not (used == used[:1]).all():
        return
    remedy = "use an intercept that is penalised too (penalise_intercept=True), or no intercept"
    if _two_sided(objective) and bool(((used == 0) | (used == 1)).all()):
        raise SeparationError(
            "targets of at least two classes", "the same target for every example", remedy
        )
    if _counts(objective) and bool((used == 0).all()):
        raise SeparationError("some target above 0", "the target 0 for every example", remedy)


def check_separation(objective: Objective, coefficients: Tensor) -> None:
    """SeparationError if the fit ran off because the targets are separated."""
    outputs = objective.design.outputs(coefficients)
    if _suspicious(objective, outputs):
        _check_directions(objective)


def check_separation_elsewhere(objective: Objective, coefficients: Tensor) -> None:
    """The same for coefficients that another library stopped at, perhaps early."""
    check_one_class(objective)
    outputs = objective.design.outputs(coefficients)
    if _suspicious(objective, outputs) or _still_moving(objective, coefficients, outputs):
        _check_directions(objective)


def _check_directions(objective: Objective) -> None:
    """SeparationError if there is a direction of no return."""
    margins, fixed = _margins(objective)
    if margins is None or fixed is None:
        return
    found = linprog(
        -margins.sum(0),
        A_ub=-margins,
        b_ub=np.zeros(len(margins)),
        A_eq=fixed if len(fixed) else None,
        b_eq=np.zeros(len(fixed)) if len(fixed) else None,
        bounds=[(-1, 1)] * margins.shape[1],
        method="highs",
        options={"time_limit": TIME_LIMIT},
    )
    if found.status != 0 or -found.fun <= 1e-7 * np.abs(margins).sum():
        return
    complete = _is_complete(margins, fixed)
    sparse = _sparse_direction(objective, margins, fixed)
    direction = found.x if sparse is None else sparse
    strict = margins @ direction > 1e-9 * np.abs(margins @ direction).max()
    raise SeparationError(
        "targets that overlap, so that the likelihood has a maximum",
        _description(objective, direction, complete, complete and bool(strict.all())),
        ADVICE,
    )


def _two_sided(objective: Objective) -> bool:
    likelihood = objective.likelihood
    if isinstance(likelihood, ElementwiseLikelihood):
        return likelihood.name == "bernoulli"
    return isinstance(likelihood, Categorical)


def _counts(objective: Objective) -> bool:
    likelihood = objective.likelihood
    counts = ("poisson", "negative_binomial", "tweedie")
    return isinstance(likelihood, ElementwiseLikelihood) and likelihood.name in counts


def _still_moving(objective: Objective, coefficients: Tensor, outputs: Tensor) -> bool:
    """Whether Newton's method would go on from predictors that are far out already."""
    design = objective.design
    if float(outputs.abs().max()) < FAR_STOPPED or not (design.penalty == 0).any():
        return False
    factor = objective.factor(outputs)
    if factor is None:
        return True
    gradient = objective.gradient(coefficients, outputs)
    step = factor.solve(gradient.reshape(1, -1)).reshape(coefficients.shape)
    return float((design.outputs(step) - design.offset).abs().max()) > MOVING


def _suspicious(objective: Objective, outputs: Tensor) -> bool:
    """Predictors far out, and next to no curvature left along some column."""
    design = objective.design
    free = design.penalty == 0
    if float(outputs.abs().max()) < FAR or not free.any():
        return False
    if design.ones and not free[1:].any():  # an intercept alone separates one class only
        return False
    factor = objective.factor(outputs)
    if factor is None:
        return True
    reach = (design.weights[:, None] * design.matrix.square()).sum(0).repeat(outputs.shape[1])
    return bool((factor.covariance.diagonal() * reach > 1 / FLAT).any())


def _margins(objective: Objective) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Rows that must not be negative, and rows that must be zero, for a direction of no return."""
    design, likelihood = objective.design, objective.likelihood
    used = design.weights > 0
    matrix, targets = design.matrix[used].numpy(), objective.targets[used].numpy()
    free = (design.penalty == 0).numpy()
    matrix = np.where(free, matrix, 0.0)  # a penalty holds the other columns
    if isinstance(likelihood, Categorical):
        own = targets.argmax(1)
        count = targets.shape[1]
        rows = [_against(matrix, own, other, count) for other in range(count)]
        return np.concatenate(rows), np.zeros((0, count * matrix.shape[1]))
    if not isinstance(likelihood, ElementwiseLikelihood):
        return None, None
    single = targets[:, 0]
    if likelihood.name == "bernoulli" and likelihood.link.name not in ("log", "identity"):
        pure = (single == 0) | (single == 1)
        return (2 * single - 1)[pure, None] * matrix[pure], matrix[~pure]
    if _counts(objective) and likelihood.link.name == "log" and bool((single == 0).any()):
        return -matrix[single == 0], matrix[single > 0]
    return None, None


def _against(matrix: np.ndarray, own: np.ndarray, other: int, count: int) -> np.ndarray:
    """Margins of the own class over another one, [M, K P]."""
    chosen = own != other
    rows = np.zeros((int(chosen.sum()), count, matrix.shape[1]))
    rows[np.arange(len(rows)), own[chosen]] = matrix[chosen]
    rows[:, other] -= matrix[chosen]
    return rows.reshape(len(rows), -1)


def _is_complete(margins: np.ndarray, fixed: np.ndarray) -> bool:
    """Whether some direction keeps every margin above 0 at once."""
    if len(fixed):
        return False
    wide = np.hstack([-margins, np.ones((len(margins), 1))])  # smallest margin, the last variable
    goal = np.zeros(wide.shape[1])
    goal[-1] = -1.0
    found = linprog(
        goal,
        A_ub=wide,
        b_ub=np.zeros(len(wide)),
        bounds=[(-1, 1)] * margins.shape[1] + [(0, None)],
        method="highs",
        options={"time_limit": TIME_LIMIT},
    )
    return found.status == 0 and -found.fun > 1e-9 * np.abs(margins).max()


def _sparse_direction(
    objective: Objective, margins: np.ndarray, fixed: np.ndarray
) -> np.ndarray | None:
    """That of the smallest L1 norm for its sum of margins; few columns have a part in it."""
    scale = objective.design.matrix.abs().amax(0).numpy().clip(min=np.finfo(float).tiny)
    width = margins.shape[1]
    cost = np.tile(scale, 2 * width // len(scale))
    equal = np.concatenate([fixed, margins.sum(0)[None]])
    found = linprog(
        cost,  # of the positive and the negative part
        A_ub=np.hstack([-margins, margins]),
        b_ub=np.zeros(len(margins)),
        A_eq=np.hstack([equal, -equal]),
        b_eq=np.r_[np.zeros(len(fixed)), np.abs(margins).sum()],
        method="highs",
        options={"time_limit": TIME_LIMIT},
    )
    return found.x[:width] - found.x[width:] if found.status == 0 else None


def _description(objective: Objective, direction: np.ndarray, complete: bool, whole: bool) -> str:
    names = objective.design.names
    size = np.abs(direction.reshape(-1, len(names))).max(0)
    scaled = size * objective.design.matrix.abs().amax(0).numpy()
    involved = [names[k] for k in np.argsort(-scaled) if scaled[k] > 1e-6 * scaled.max()]
    columns = ", ".join(involved[:6]) + (", ..." if len(involved) > 6 else "")
    kind, how = "complete" if complete else "quasi-complete", "all" if whole else "some"
    return (
        f"{kind} separation: a combination of {columns} tells {how} targets apart without error, "
        "so its coefficients grow for ever"
    )
