r"""Steps of the weights to the minimum of the remaining data: the one solver of

.. math:: (W - H_m)\, x_m = b_m

W is the curvature of all data with the prior, :math:`H_m` that of what is left out, an example or
a group, and :math:`b_m` its gradient. The systems are solved together, by conjugate gradients
preconditioned with the posterior's precision S. Where W is S itself its products come for free,
and where S is known in some directions only it is as in :mod:`engram.linalg.low_rank`; else W is
an exact operator of :mod:`engram.curvature.operators`.

:func:`solve_left_out` is the last case for single examples, as :func:`engram.refine` has it:

.. math:: \Delta\theta_i = (H + \delta - H_i)^{-1} \nabla \ell_i, \qquad d_i = J_i \Delta\theta_i

It refuses a step where the objective of the remaining data does not agree with the quadratic model
that the step came from, by the ratio of actual to predicted decrease that trust-region methods use.
With :math:`R_i` the objective without example i and :math:`L` that of all data,

.. math:: \frac{R_i(\theta + \Delta\theta_i) - R_i(\theta) - \nabla L' \Delta\theta_i}
    {-\frac12 \nabla\ell_i' \Delta\theta_i}

is 1 where the quadratic model is exact (the term with :math:`\nabla L` takes out what further
training of the whole model would bring). Where the curvature nearly vanishes in some direction the
step is far too long, and the ratio small or negative.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.memory import available_bytes
from engram.core.parameters import Layout, Named, trainable
from engram.core.state.model import device_of, outputs_at
from engram.curvature.operators import Operator, exact_curvature
from engram.curvature.per_example import (
    PerExampleCurvature,
    PerExampleGaussNewton,
    PerExampleHessian,
)
from engram.engine.session import Observed, Session
from engram.linalg.cg import ApplyTo, Limits, Solution, conjugate_gradients
from engram.posteriors.gaussian import Posterior

# Solves with S itself in the place of W: products with an example's own Hessian only
TOLERANCE = 1e-2  # relative residual; a tenth of it changed the fourth digit of correlations
DOUBLE_TOLERANCE = 1e-9  # the same in double precision: who uses it wants equality
LARGEST_ITERATION = 50  # products, of which a few are enough

# Solves with the exact curvature of all data: a pass over the data for every product
MOST_PRODUCTS = 300  # for a block of examples; unsolved ones are flagged after it
LARGEST_BLOCK = 64  # examples solved together: they share passes, and all wait for the slowest
MEMORY_SHARE = 0.1  # of the free memory, for the vectors of a block
VECTORS_PER_EXAMPLE = 8  # [P] each: solution, residual, direction, image and temporaries
SMALLEST_AGREEMENT = 0.5  # actual over predicted decrease; below, a safer curvature is taken


def own_limits(posterior: Posterior, right: Tensor, iterations: int = LARGEST_ITERATION) -> Limits:
    """Where solves with a posterior's own exact Hessian end; ``TOLERANCE`` is good enough."""
    known = posterior.blocks[0].in_own_type(right)
    double = known.dtype == torch.float64
    return Limits(DOUBLE_TOLERANCE if double else TOLERANCE, iterations)


def solve_without(
    posterior: Posterior,
    own: ApplyTo,
    right: Tensor,
    limits: Limits,
    whole: Operator | None = None,
) -> Solution:
    """(W - H_m)^-1 b_m for every row of b.

    Args:
        posterior: its precision preconditions the solves.
        own: H_m v for rows v of the systems numbered.
        right: b, [M, P], in the layout of the parameters that the posterior covers.
        limits: where it ends.
        whole: W; the posterior's precision itself if not given.
    """
    layout = posterior.layout
    if whole is None and len(posterior.blocks) == 1:
        (block,) = posterior.blocks
        found = block.solve_without(own, block.in_own_type(right), limits)
        return replace(found, vectors=found.vectors.to(right))

    def times(vectors: Tensor, rows: Tensor, weighted: Tensor) -> Tensor:
        image = weighted if whole is None else whole @ vectors
        return image - own(vectors, rows)

    def precondition(vectors: Tensor) -> Tensor:
        return posterior.solve_rows(vectors, layout)

    return conjugate_gradients(times, right, limits, precondition)


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
    """Solve for every chosen example; again with a safer curvature where a step is refused.

    Args:
        posterior: preconditions the solves and gives the prior.
        chosen: positions in the data, [M].
        curvature: ``hessian`` or ``ggn``.
        tolerance: relative residual at which a system counts as solved.
    """
    layout = posterior.layout
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
    """Solve in blocks of examples with one choice of curvatures."""
    layout, limits = objective.layout, Limits(tolerance, MOST_PRODUCTS)
    exact = exact_curvature(remaining.whole, opened, layout, posterior.prior_vector)
    deviations, found, refused = [], [], []
    for block in chosen.split(_examples_at_once(opened, layout)):
        observed = opened.observe(opened.batches.take(block))
        right = observed.trace.own_gradient_rows(observed.residual, layout)
        own = _own_curvature(remaining.own, observed, opened, layout)
        solution = solve_without(posterior, own.of, right, limits, exact)
        steps = layout.unflatten(solution.vectors)
        deviations.append(observed.trace.own_tangents(steps).cpu())
        found.append(solution)
        promised = 0.5 * (wide(right) * wide(solution.vectors)).sum(1)
        kept = objective.of_steps(block, solution.vectors, promised)
        refused.append((solution.indefinite | ~(kept >= SMALLEST_AGREEMENT)).cpu())
        observed.trace.release()
    return Solved(
        torch.cat(deviations),
        torch.cat([s.residual.cpu() for s in found]),
        torch.cat(refused),
        exact.products,
    )


def _own_curvature(
    kind: str, observed: Observed, opened: Session, layout: Layout
) -> PerExampleCurvature:
    if kind == "ggn":
        return PerExampleGaussNewton(opened, observed, layout)
    return PerExampleHessian(opened, observed.batch, observed.targets, layout)


def _examples_at_once(opened: Session, layout: Layout) -> int:
    per_example = torch.float64.itemsize * VECTORS_PER_EXAMPLE * layout.num_params
    budget = MEMORY_SHARE * available_bytes(device_of(opened.model))
    return max(1, min(LARGEST_BLOCK, opened.largest_part, int(budget / per_example)))


class Agreement:
    """Actual over predicted decrease of the objective without an example, for a step."""

    def __init__(self, opened: Session, posterior: Posterior, layout: Layout) -> None:
        self.opened, self.layout = opened, layout
        parameters = {name: trainable(opened.model)[name] for name in layout.names}
        self.start = layout.flatten({n: p.detach() for n, p in parameters.items()})
        self.prior = posterior.prior_vector.to(self.start.device)
        self.gradient = wide(torch.zeros_like(self.start))
        losses = []
        for observed in opened.passes("objective"):
            pulled = opened.pull_back(observed.batch, observed.residual, parameters)
            self.gradient += wide(layout.flatten(pulled))
            losses.append(wide(observed.loss))
        self.losses = torch.cat(losses)

    def of_steps(self, chosen: Tensor, steps: Tensor, promised: Tensor) -> Tensor:
        """The ratio for every step, [M].

        Args:
            chosen: the left-out example of each, [M].
            steps: changes of the parameters, [M, P].
            promised: half of <grad loss_i, step>, [M].
        """
        ratios = []
        for i, step, half in zip(chosen.tolist(), steps, promised, strict=True):
            change = self._losses_at(self.layout.unflatten(self.start + step)) - self.losses
            change[i] = 0.0
            widened = wide(step)
            found = change.sum() + 0.5 * (self.prior * widened**2).sum() - self.gradient @ widened
            ratios.append(found / -half if half > 0 else torch.ones_like(found))
        return torch.stack(ratios)

    def _losses_at(self, parameters: Named) -> Tensor:
        model, likelihood = self.opened.model, self.opened.likelihood
        losses = []
        for batch in self.opened.batches:
            on_device = batch.to(device_of(model))
            outputs = outputs_at(model, parameters, on_device)
            targets = likelihood.prepare(outputs, on_device.targets)
            losses.append(wide(likelihood.loss(outputs, targets)))
        return torch.cat(losses)
