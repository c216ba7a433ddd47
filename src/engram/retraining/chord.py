r"""Steps of many copies with one Hessian, where they all start.

.. math:: g_c + H d - (\nabla \ell_c(\theta_c + d) - \nabla \ell_c(\theta_c)) = 0

Copies that leave out little stay near their common start, so that the Hessian there serves all of
them for all of their steps. What a copy leaves out, l_c, is no part of its objective; the change of
that gradient costs a few examples and is followed exactly, while each step is found. How the
Hessian changes along the way a copy learns from its last steps, by Anderson's mixing. A step that
does not pay is not taken, though learned from; a copy that makes several of them is given back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.linalg.gcr import LEFT_WAITING, BlockGCR
from engram.retraining.quasi_newton import Objective, Progress

STEPS = 12
LARGEST_SHARE = 0.98  # of the gradient norm that a step may leave
SLOW = 0.5  # of the gradient norm: a step that leaves more is taken, but has not paid
FAILURES = 4  # steps that have not paid before a copy is given back
GOAL = 0.8  # of the wanted norm: what a step may leave of the gradient as it is foreseen
FORESEEN = 3  # solves for a step; the later ones correct it for what its copy leaves out
UNTRUSTED = 0.5  # of what a step may leave: own changes below this are taken for rounding


class _OwnChanges:
    """Moves of each copy, and how its gradient changed along them.

    Args:
        gradients: of the copies, [C, P].
        width: entries of a move.
    """

    def __init__(self, gradients: Tensor, width: int) -> None:
        self.gradients, self.width = gradients, width
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, moves: Tensor, changes: Tensor) -> None:
        like = self.gradients
        full = like.new_zeros(len(like), self.width), torch.zeros_like(like)
        full[0][rows], full[1][rows] = moves, changes
        self.pairs.append(full)

    def explain(self, rows: Tensor, gradient: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """The move back along own moves that leaves the least gradient, and what it leaves."""
        if not self.pairs:
            return gradient.new_zeros(len(rows), self.width), gradient
        moves = torch.stack([pair[0][rows] for pair in self.pairs], dim=1)
        changes = torch.stack([pair[1][rows] for pair in self.pairs], dim=1)
        gram = wide(changes @ changes.mT)
        gram.diagonal(dim1=1, dim2=2).add_((UNTRUSTED * wide(goals)[:, None]).square())
        weights = torch.linalg.solve(gram, wide(changes @ gradient[:, :, None]))
        weights = weights.mT.to(gradient.dtype)
        return (weights @ moves)[:, 0], gradient - (weights @ changes)[:, 0]


def follow(
    objective: Objective,
    state: Progress,
    targets: Tensor,
    shared: BlockGCR,
    report: Callable[[int], None],
) -> list[tuple[Tensor, Tensor]]:
    """Move the copies until their gradient norms are below their targets, or steps do not pay.

    Args:
        objective: of the copies.
        state: where they are; it is changed. Copies still ``moving`` afterwards need other steps.
        targets: gradient norms to reach, [C].
        shared: the inverse of the Hessian where the copies start.
        report: called with the number of copies that have just finished.

    Returns:
        The copies' moves and the changes of their gradients, [C, P] each; 0 for a copy at rest.
    """
    weights, start_value = objective.weights, state.value.clone()
    own = _OwnChanges(state.flat, state.flat.shape[1])
    targets = targets.to(state.flat.device)
    rounding = 20 * torch.finfo(state.flat.dtype).eps * start_value.abs()
    report(state.settle(targets))
    failures = torch.zeros(len(state.flat), dtype=torch.long)
    for _ in range(STEPS):
        rows = (state.moving & (failures < FAILURES)).nonzero()[:, 0].to(state.flat.device)
        if len(rows) == 0:
            break
        goals = GOAL * targets[rows].to(state.flat.dtype)
        back, rest = own.explain(rows, state.gradient[rows], goals)
        part = objective.only(rows)
        step = foreseen_step(part, state.flat[rows] - back, rest, goals, shared) - back
        trial = state.flat[rows] + step
        value, gradient = objective.stack.value_and_gradient(trial, weights[rows])
        state.evaluations[rows.cpu()] += 1
        norm, before = wide(gradient).norm(dim=1), state.norm[rows]
        good = (norm <= LARGEST_SHARE * before) & (value <= (start_value + rounding)[rows])
        own.add(rows, step, gradient - state.gradient[rows])
        kept = rows[good]
        state.flat[kept], state.value[kept] = trial[good], value[good]
        state.gradient[kept] = gradient[good]
        failures[rows[~good | (norm > SLOW * before)].cpu()] += 1
        report(state.settle(targets))
    return own.pairs


def foreseen_step(
    objective: Objective, flat: Tensor, gradient: Tensor, goals: Tensor, shared: BlockGCR
) -> Tensor:
    """Steps d [C, P] after which g + H d, less the change of the left-out gradient, is small.

    Args:
        objective: of the copies.
        flat: where they are, [C, P].
        gradient: g there, [C, P].
        goals: norms that may be left, [C]; a few copies may be left with more.
        shared: the inverse of H.
    """
    stack, members = objective.stack, objective.members
    before = stack.left_out(flat, members)[1]
    size = flat.shape[1]
    own = _OwnChanges(flat, 2 * size)  # a move and its product with H
    total, foreseen = flat.new_zeros(len(flat), 2 * size), gradient.clone()
    best, least = torch.zeros_like(flat), torch.full_like(goals, torch.inf)
    for number in range(FORESEEN):
        rows = (foreseen.norm(dim=1) > goals).nonzero()[:, 0]
        if len(rows) <= LEFT_WAITING * len(flat):
            break
        back, rest = own.explain(rows, foreseen[rows], goals[rows])
        solved, left = shared.known(rest) if number else shared.solve(rest, goals[rows])
        move = -(back + torch.cat([solved, rest - left], dim=1))
        total[rows] += move
        step, image = total[rows].split(size, dim=1)
        chosen = [members[row] for row in rows.tolist()]
        change = stack.left_out(flat[rows] + step, chosen)[1] - before[rows]
        found = gradient[rows] + image - change
        own.add(rows, move, found - foreseen[rows])
        foreseen[rows] = found
        norm = found.norm(dim=1)
        better = norm < LARGEST_SHARE * least[rows]
        if not better.any():
            break
        best[rows[better]], least[rows[better]] = step[better], norm[better]
    return best
