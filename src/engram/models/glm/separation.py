r"""Separation: targets that a hyperplane tells apart have no maximum-likelihood coefficients.

A direction b in which no example's loss ever rises and some example's falls without end makes the
likelihood grow for ever. Whether there is one is a linear programme: maximise the sum of margins
:math:`m_i(b) \ge 0` over :math:`|b_p| \le 1`.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from engram.errors import SeparationError
from engram.models.glm.newton import Objective

# when a fit is looked at; a look is a linear programme, which costs more than the fit
FAR = 3.0  # linear predictor, by its size, below which no fit has run off: a probit is flat from 6
FLAT = 1e-6  # and curvature along some column below this, relative to a loss of curvature 1
FAR_STOPPED = 4.0  # the same of a fit by another library, which may have stopped on its way,
MOVING = 0.05  # where one more Newton step would move some predictor by more than this
TIME_LIMIT = 60.0  # seconds of a linear programme; beyond, separation stays undetected
# what a direction has to reach, as the solver is good to 1e-9 or so
SEPARATED = 1e-7  # its sum of margins over that of their sizes: less is the solver's tolerance
STRICT = 1e-9  # a margin over the largest one: less counts as on the boundary
INVOLVED = 1e-6  # a coefficient over the largest one, columns scaled alike: less has no part in it
MENTIONED = 6  # columns named in a message
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
    if not bool((used == used[:1]).all() & objective.likelihood.at_limit(used).all()):
        return
    raise SeparationError(
        "targets of at least two classes, or of counts some target above 0",
        f"the same target for every example, {used[0].tolist()}",
        "use an intercept that is penalised too (penalise_intercept=True), or no intercept",
    )


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
    found = _margins(objective)
    if found is None:
        return
    margins, fixed = found
    best = linprog(
        -margins.sum(0),
        A_ub=-margins,
        b_ub=np.zeros(len(margins)),
        A_eq=fixed if len(fixed) else None,
        b_eq=np.zeros(len(fixed)) if len(fixed) else None,
        bounds=[(-1, 1)] * margins.shape[1],
        method="highs",
        options={"time_limit": TIME_LIMIT},
    )
    if best.status != 0 or -best.fun <= SEPARATED * np.abs(margins).sum():
        return
    complete = _is_complete(margins, fixed)
    sparse = _sparse_direction(objective, margins, fixed)
    direction = best.x if sparse is None else sparse
    strict = margins @ direction > STRICT * np.abs(margins @ direction).max()
    raise SeparationError(
        "targets that overlap, so that the likelihood has a maximum",
        _description(objective, direction, complete, complete and bool(strict.all())),
        ADVICE,
    )


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


def _margins(objective: Objective) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows that must not be negative, and rows that must be zero, for a direction of no return.

    Both [M, K P]; None where no loss falls for ever.
    """
    design = objective.design
    used = design.weights > 0
    ways = objective.likelihood.recession(objective.targets[used])
    if ways is None:
        return None
    matrix = torch.where(design.penalty == 0, design.matrix[used], 0.0)  # a penalty holds others
    held = torch.diag_embed(ways.held.to(matrix.dtype))
    return _rows(ways.directions, matrix), _rows(held, matrix)


def _rows(directions: Tensor, matrix: Tensor) -> np.ndarray:
    """Directions of outputs [N, R, K] as those of coefficients, [M, K P]; none for a zero row."""
    ordered = directions.transpose(0, 1)  # those of all examples by one row, then by the next
    asked = (ordered != 0).any(2)
    inputs = matrix[asked.nonzero()[:, 1]]
    return (ordered[asked][:, :, None] * inputs[:, None, :]).flatten(1).numpy()


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
    return found.status == 0 and -found.fun > STRICT * np.abs(margins).max()


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
    involved = [names[k] for k in np.argsort(-scaled) if scaled[k] > INVOLVED * scaled.max()]
    columns = ", ".join(involved[:MENTIONED]) + (", ..." if len(involved) > MENTIONED else "")
    kind, how = "complete" if complete else "quasi-complete", "all" if whole else "some"
    return (
        f"{kind} separation: a combination of {columns} tells {how} targets apart without error, "
        "so its coefficients grow for ever"
    )
