r"""The step of leaving one example out, with the exact curvature of the remaining data.

.. math:: \Delta\theta_i = (H + \delta - H_i)^{-1} \nabla \ell_i, \qquad d_i = J_i \Delta\theta_i

H is the curvature of all data and :math:`H_i` the example's own. A block of examples is solved
together: every system has its own right-hand side and its own last term, and all share the passes
for H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.memory import available_bytes
from engram.core.parameters import Layout
from engram.core.state.model import device_of
from engram.curvature.operators import CurvatureOperator
from engram.curvature.per_example import per_example_hessian_products
from engram.engine.session import Observed, Session
from engram.evidence.agreement import Agreement
from engram.linalg.cg import Solution, conjugate_gradients
from engram.posteriors.gaussian import Posterior
from engram.posteriors.trace_estimation import covered_layout, prior_vector

LARGEST_ITERATION = 300
LARGEST_BLOCK = 64
MEMORY_SHARE = 0.1
SMALLEST_AGREEMENT = 0.5  # of the promised decrease, below which a step is refused
VECTORS_PER_EXAMPLE = 8  # solution, residual, direction, image and temporaries


@dataclass(frozen=True)
class Solved:
    """Deviations of M examples.

    Args:
        deviation: d, [M, K].
        residual: relative residual of each solve, [M].
        refused: where the curvature that was asked for was not positive without the example,
            or led too far, and another was taken, [M].
        products: products with the exact curvature, one pass over the data each.
    """

    deviation: Tensor
    residual: Tensor
    refused: Tensor
    products: int


@dataclass(frozen=True)
class Remaining:
    """Which curvature of all data, and which of the example is taken from it."""

    whole: str
    own: str


# The Hessian of the remaining data is what a minimum is found with. It need not be positive
# definite at the present weights, or nearly vanishes in some direction; keeping the example's own
# residual part, or leaving out all of them, brings it further from that.
REMAINING = {
    "hessian": (
        Remaining("hessian", "hessian"),
        Remaining("hessian", "ggn"),
        Remaining("ggn", "ggn"),
    ),
    "ggn": (Remaining("ggn", "ggn"),),
}


def solve_left_out(
    opened: Session, posterior: Posterior, chosen: Tensor, curvature: str, tolerance: float
) -> Solved:
    """Solve for every chosen example; again, more cautiously, where it was not definite.

    Args:
        posterior: preconditions the solves and gives the prior.
        chosen: positions in the data, [M].
        curvature: ``hessian`` or ``ggn``.
        tolerance: relative residual at which a system counts as solved.
    """
    layout = covered_layout(posterior)
    objective = Agreement(opened, posterior, layout)
    first, *others = REMAINING[curvature]
    solved = _solve_as(opened, posterior, chosen, first, tolerance, objective)
    pending = solved.refused.nonzero()[:, 0]
    deviation, residual, products = solved.deviation, solved.residual, solved.products
    for remaining in others:
        if len(pending) == 0:
            break
        again = _solve_as(opened, posterior, chosen[pending], remaining, tolerance, objective)
        deviation[pending], residual[pending] = again.deviation, again.residual
        products += again.products
        pending = pending[again.refused]
    return Solved(deviation, residual, solved.refused, products)


def _solve_as(
    opened: Session,
    posterior: Posterior,
    chosen: Tensor,
    remaining: Remaining,
    tolerance: float,
    objective: Agreement,
) -> Solved:
    """Block by block."""
    layout = objective.layout
    exact = CurvatureOperator(opened, layout, remaining.whole)
    deviations, found, refused = [], [], []
    for block in chosen.split(_examples_at_once(opened, layout)):
        own = _Own(opened.observe(opened.batches.take(block)), opened, layout, remaining.own)
        solution = _solve_block(exact, posterior, own, tolerance)
        deviations.append(own.tangents(solution.vectors).cpu())
        found.append(solution)
        right = own.gradients(own.observed.residual)
        promised = 0.5 * (wide(right) * wide(solution.vectors)).sum(1)
        kept = objective.of_steps(block, solution.vectors, promised)
        refused.append((solution.indefinite | ~(kept >= SMALLEST_AGREEMENT)).cpu())
        own.observed.trace.release()
    return Solved(
        torch.cat(deviations),
        torch.cat([s.residual.cpu() for s in found]),
        torch.cat(refused),
        exact.products,
    )


class _Own:
    """What each example of a block adds by itself: its gradient and its curvature."""

    def __init__(self, observed: Observed, opened: Session, layout: Layout, kind: str) -> None:
        self.observed, self.model, self.likelihood = observed, opened.model, opened.likelihood
        self.layout = layout
        self.curvature_times = {"ggn": self._gauss_newton, "hessian": self._hessian}[kind]

    def gradients(self, seed: Tensor) -> Tensor:
        """J_i' seed_i, [B, P]."""
        return self.observed.trace.own_gradient_rows(seed, self.layout)

    def tangents(self, vectors: Tensor) -> Tensor:
        """J_i v_i, [B, K]."""
        return self.observed.trace.own_tangents(self.layout.unflatten(vectors))

    def _hessian(self, vectors: Tensor) -> Tensor:
        """H_i v_i, [B, P]."""
        observed, named = self.observed, self.layout.unflatten(vectors)
        return per_example_hessian_products(
            self.model, self.likelihood, observed.batch, observed.targets, named
        )

    def _gauss_newton(self, vectors: Tensor) -> Tensor:
        """J_i' Lambda_i J_i v_i, [B, P]."""
        outputs, targets = self.observed.outputs, self.observed.targets
        moved = self.tangents(vectors)
        return self.gradients(self.likelihood.hessian_times(outputs, targets, moved))


def _solve_block(
    exact: CurvatureOperator, posterior: Posterior, own: _Own, tolerance: float
) -> Solution:
    layout = own.layout
    right = own.gradients(own.observed.residual)
    prior = prior_vector(posterior, layout).to(right)

    def times(vectors: Tensor, rows: Tensor, conditioned: Tensor) -> Tensor:
        whole = torch.zeros_like(right)
        whole[rows] = vectors
        return exact.times(vectors) + prior * vectors - own.curvature_times(whole)[rows]

    def precondition(vectors: Tensor) -> Tensor:
        return layout.flatten(posterior.solve(layout.unflatten(vectors)))

    return conjugate_gradients(times, precondition, right, tolerance, LARGEST_ITERATION)


def _examples_at_once(opened: Session, layout: Layout) -> int:
    per_example = 8 * VECTORS_PER_EXAMPLE * layout.num_params
    budget = MEMORY_SHARE * available_bytes(device_of(opened.model))
    return max(1, min(LARGEST_BLOCK, opened.largest_part, int(budget / per_example)))
