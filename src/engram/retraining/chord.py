r"""Steps of many copies with one Hessian, where they all start.

.. math:: \theta_c \leftarrow \theta_c - H^{-1} g_c(\theta_c)

Copies that leave out little stay near their common start, so that the Hessian there serves all of
them for all of their steps. What is a copy's own (the curvature of what it leaves out, and how the
Hessian changes along its way) it learns from its last steps, by Anderson's mixing. A step that does
not pay is not taken, though learned from; a copy that makes several of them is given back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engram.retraining.quasi_newton import Objective, Progress
from engram.retraining.shared_inverse import SharedInverse

STEPS = 12
LARGEST_SHARE = 0.98  # of the gradient norm that a step may leave
FAILURES = 3  # steps that do not pay before a copy is given back
GOAL = 0.9  # of the wanted norm: what a step's linear system may leave
RIDGE = 1e-10  # of own changes that are nearly dependent


class _OwnChanges:
    """Steps of each copy, and how its gradient changed along them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, like: Tensor, rows: Tensor, steps: Tensor, changes: Tensor) -> None:
        full = torch.zeros_like(like), torch.zeros_like(like)
        full[0][rows], full[1][rows] = steps, changes
        self.pairs.append(full)

    def explain(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The step back along own steps that leaves the least gradient, and what it leaves."""
        if not self.pairs:
            return torch.zeros_like(gradient), gradient
        steps = torch.stack([pair[0][rows] for pair in self.pairs], dim=1)
        changes = torch.stack([pair[1][rows] for pair in self.pairs], dim=1)
        gram = (changes @ changes.mT).double()
        size = gram.diagonal(dim1=1, dim2=2).mean(1)
        gram += RIDGE * size[:, None, None] * torch.eye(gram.shape[1], device=gram.device)
        weights = torch.linalg.solve(gram, (changes @ gradient[:, :, None]).double())
        weights = weights.mT.to(gradient.dtype)
        return (weights @ steps)[:, 0], gradient - (weights @ changes)[:, 0]


def follow(
    objective: Objective,
    state: Progress,
    targets: Tensor,
    shared: SharedInverse,
    report: Callable[[int], None],
) -> None:
    """Move the copies until their gradient norms are below their targets, or steps do not pay.

    Args:
        objective: of the copies.
        state: where they are; it is changed. Copies still ``moving`` afterwards need other steps.
        targets: gradient norms to reach, [C].
        shared: the inverse of the Hessian where the copies start.
        report: called with the number of copies that have just finished.
    """
    weights, own, start_value = objective.weights, _OwnChanges(), state.value.clone()
    targets = targets.to(state.flat.device)
    rounding = 20 * torch.finfo(state.flat.dtype).eps * start_value.abs()
    report(state.settle(targets))
    failures = torch.zeros(len(state.flat), dtype=torch.long)
    for _ in range(STEPS):
        rows = (state.moving & (failures < FAILURES)).nonzero()[:, 0].to(state.flat.device)
        if len(rows) == 0:
            break
        back, rest = own.explain(rows, state.gradient[rows])
        goals = GOAL * targets[rows].to(rest.dtype)
        step = -(back + shared.solve(rest, goals))
        trial = state.flat[rows] + step
        value, gradient = objective.stack.value_and_gradient(trial, weights[rows])
        state.evaluations[rows.cpu()] += 1
        norm, before = gradient.double().norm(dim=1), state.norm[rows]
        good = (norm <= LARGEST_SHARE * before) & (value <= (start_value + rounding)[rows])
        own.add(state.flat, rows, step, gradient - state.gradient[rows])
        kept = rows[good]
        state.flat[kept], state.value[kept] = trial[good], value[good]
        state.gradient[kept] = gradient[good]
        failures[rows[~good].cpu()] += 1
        report(state.settle(targets))
