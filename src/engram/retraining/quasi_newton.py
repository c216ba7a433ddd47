r"""Full-batch quasi-Newton steps for many copies at once, each with its own step control.

.. math:: \theta_c \leftarrow \theta_c - t_c B_c^{-1} g_c

:math:`B_c` comes from the copy's own last steps, around curvature that all copies share; a copy
that has converged is set aside, so that the others get cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.linalg.lbfgs import Base, LBFGSMemory
from engram.retraining.stack import Objective

# The line search, with the constants that textbooks have
SUFFICIENT = 1e-4  # share of the linear decrease that a step must reach (Armijo)
TRIALS = 12  # lengths of one step that are tried before the copy counts as stuck
SHORTEST, LONGEST = 0.1, 0.5  # shares of a refused length that the next one may have
VALUE_ROUNDINGS = 20  # machine epsilons of an objective's value by which its sum is uncertain


@dataclass
class Progress:
    """State of the minimisation of many copies: parameters, values, gradients, which still step."""

    flat: Tensor
    value: Tensor
    gradient: Tensor
    moving: Tensor
    evaluations: Tensor

    @property
    def norm(self) -> Tensor:
        """Gradient norm of each copy, [C]."""
        return wide(self.gradient).norm(dim=1)

    def only(self, rows: Tensor) -> Progress:
        """The state of some of the copies."""
        here, there = rows.to(self.flat.device), rows.cpu()
        return Progress(
            *(part[here] for part in (self.flat, self.value, self.gradient)),
            *(part[there] for part in (self.moving, self.evaluations)),
        )

    def take(self, rows: Tensor, part: Progress) -> None:
        """Write the state of some of the copies back."""
        here, there = rows.to(self.flat.device), rows.cpu()
        self.flat[here], self.value[here] = part.flat, part.value
        self.gradient[here] = part.gradient
        self.moving[there], self.evaluations[there] = part.moving, part.evaluations

    def settle(self, targets: Tensor) -> int:
        """Stop the copies that have reached their gradient norms; how many these are."""
        finished = self.moving & (self.norm <= targets.to(self.gradient.device)).cpu()
        self.moving &= ~finished
        return int(finished.sum())


def begin(objective: Objective, start: Tensor) -> Progress:
    """Values and gradients where the copies start; a point that all share is visited once."""
    stack, members = objective.stack, objective.members
    if bool((start == start[:1]).all()):
        everything = start.new_ones(1, stack.num_data)
        value, gradient = stack.value_and_gradient(start[:1], everything)
        left_value, left_gradient = stack.left_out(start, members)
        value, gradient = value - left_value, gradient - left_gradient
    else:
        value, gradient = stack.value_and_gradient(start, objective.weights)
    moving = torch.ones(len(start), dtype=torch.bool)
    return Progress(start.clone(), value, gradient, moving, torch.ones(len(start)).long())


def minimise(
    objective: Objective,
    state: Progress,
    targets: Tensor,
    iterations: int,
    own: LBFGSMemory,
    base: Base,
    report: Callable[[int], None],
) -> Progress:
    """Step until every copy's gradient norm is below its target, or nothing improves any more.

    Args:
        objective: of the copies.
        state: where they are; only copies that are moving go on.
        targets: gradient norms to reach, [C].
        iterations: at most so many steps.
        own: pairs of each copy.
        base: the inverse Hessian to begin with, the same for all copies.
        report: called with the number of copies that have just finished.
    """
    weights, solved = objective.weights, base.apply(state.gradient)
    for _ in range(iterations):
        report(state.settle(targets))
        rows = state.moving.nonzero()[:, 0].to(state.flat.device)
        if len(rows) == 0:
            break
        direction = _direction(state, rows, own, base, solved[rows])
        steps, changes, advanced = _search(objective, weights, state, rows, direction)
        if advanced.any():
            kept = rows[advanced]
            new = base.apply(state.gradient[kept])
            own.add(kept, steps, changes, new - solved[kept])
            solved[kept] = new
        stuck = rows[~advanced].cpu()
        state.moving[stuck] = False
        report(len(stuck))
    report(int(state.moving.sum()))
    return state


def _direction(
    state: Progress, rows: Tensor, own: LBFGSMemory, base: Base, solved: Tensor
) -> Tensor:
    """-B^-1 g; where that does not lead down, the base's own direction."""
    gradient = state.gradient[rows]
    first = torch.ones_like(gradient[:, 0])
    if not base.known:
        first = 1.0 / gradient.abs().sum(1).clamp_min(1.0)
    scale = own.scale(rows, base.memory, first)
    direction = -own.apply(rows, gradient, solved, scale)
    uphill = (direction * gradient).sum(1) >= 0
    if uphill.any():
        direction[uphill] = -scale[uphill, None] * solved[uphill]
    return direction


def _search(
    objective: Objective, weights: Tensor, state: Progress, rows: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve each copy's step until it is good; which advanced, with their steps and changes.

    A step is good where the value falls enough, or, where the fall is below rounding, where the
    slope along the step has shrunk and the value has not risen beyond rounding.
    """
    slope = wide(state.gradient[rows] * direction).sum(1)
    length = torch.ones_like(slope)
    waiting = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    steps, changes = torch.zeros_like(direction), torch.zeros_like(direction)
    rounding = VALUE_ROUNDINGS * torch.finfo(direction.dtype).eps
    for _ in range(TRIALS):
        left = waiting.nonzero()[:, 0]
        if len(left) == 0:
            break
        copies = rows[left]
        step = length[left, None].to(direction.dtype) * direction[left]
        trial = state.flat[copies] + step
        value, gradient = objective.stack.value_and_gradient(trial, weights[copies])
        state.evaluations[copies.cpu()] += 1
        fall, first = value - state.value[copies], length[left] * slope[left]
        final = wide(gradient * step).sum(1)
        slack = rounding * state.value[copies].abs()
        good = (fall <= SUFFICIENT * first) | (
            (fall <= slack) & (final <= (2 * SUFFICIENT - 1) * first) & (final.abs() <= -first)
        )
        good &= torch.isfinite(value)
        taken = left[good]
        steps[taken], changes[taken] = step[good], gradient[good] - state.gradient[copies[good]]
        done = copies[good]
        state.flat[done], state.value[done] = trial[good], value[good]
        state.gradient[done] = gradient[good]
        waiting[taken] = False
        curved = final[~good] - first[~good]
        shorter = torch.where(curved > 0, -first[~good] / curved, LONGEST)
        shorter = shorter.clamp(SHORTEST, LONGEST)
        length[left[~good]] *= torch.where(torch.isfinite(shorter), shorter, SHORTEST)
    advanced = ~waiting
    return steps[advanced], changes[advanced], advanced
