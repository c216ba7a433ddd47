r"""A fifth rule: the Newton step of the remaining data, for posteriors with the exact Hessian.

.. math:: d = J \,(S - H_i)^{-1} \nabla \ell_i

``corrected`` takes only the Gauss-Newton part of the example's own Hessian :math:`H_i` out of S.
Where S is the Hessian of the objective, all of it can be taken out: what is left is the Hessian of
the remaining data, and the step is Newton's towards their minimum. The system is solved by
conjugate gradients preconditioned with S, a few products with :math:`H_i` each; where S is known in
some directions only, as in :mod:`engram.sensitivity.low_rank_newton`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.errors import ArgumentError
from engram.core.parameters import Layout, Named
from engram.curvature.per_example import per_example_hessian_products
from engram.engine.session import Observed, Session
from engram.linalg.blocks import DenseBlock
from engram.linalg.cg import Solution, conjugate_gradients
from engram.linalg.low_rank import LowRankBlock
from engram.posteriors.gaussian import Posterior
from engram.posteriors.trace_estimation import covered_layout
from engram.sensitivity.estimators import Estimate, Setting, corrected, displaced
from engram.sensitivity.low_rank_newton import KeptSystems, Own, cautious_step

TOLERANCE = 1e-2  # ten times smaller changed the fourth digit of correlations with the truth
DOUBLE_TOLERANCE = 1e-9  # who uses double precision wants equality
LARGEST_ITERATION = 50
LARGEST_GAIN = 2.0  # of a step over that of `corrected`; beyond, S - H_i is all but singular
MOSTLY_OWN = 0.5  # share of the curvature along the cautious step that is the example's own


def has_own_hessians(posterior: Posterior) -> bool:
    """Whether every example's own Hessian is in the precision, so that it can be taken out."""
    dense = all(isinstance(block, (DenseBlock, LowRankBlock)) for block in posterior.blocks)
    return dense and posterior.exact


def check_own_hessians(posterior: Posterior) -> None:
    """ArgumentError for a posterior that the rule has no matrix of."""
    if not has_own_hessians(posterior):
        raise ArgumentError(
            'a posterior with the exact Hessian for estimator="newton"',
            repr(posterior),
            'fit it with engram.laplace(..., curvature="hessian"), or use "corrected"',
        )


def tolerance_of(right: Tensor) -> float:
    """Relative residual at which a solve ends; one of ``TOLERANCE`` is good enough to be used."""
    return DOUBLE_TOLERANCE if right.dtype == torch.float64 else TOLERANCE


def solve_without(
    posterior: Posterior, own: Own, right: Tensor, largest_iteration: int = LARGEST_ITERATION
) -> Solution:
    """(S - H)^-1 b for every row of b [B, P], with products of each row's own H.

    Args:
        posterior: with the exact Hessian.
        own: H v for rows v of the systems numbered.
        right: b, in the layout of the parameters that the posterior covers.
        largest_iteration: at most so many products per system.
    """
    layout, block = covered_layout(posterior), posterior.blocks[0]
    if isinstance(block, LowRankBlock):
        # it is known no better than to single precision, but for small models
        given = right.to(block.basis)
        found = KeptSystems(block, own, tolerance_of(given), largest_iteration).solve(given)
        return replace(found, vectors=found.vectors.to(right))

    def times(vectors: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
        return whole - own(vectors, rows)

    def precondition(vectors: Tensor) -> Tensor:
        return layout.flatten(posterior.solve(layout.unflatten(vectors)))

    return conjugate_gradients(times, precondition, right, tolerance_of(right), largest_iteration)


@dataclass(frozen=True)
class Decided:
    """What became of the examples of a batch.

    Args:
        cautious: the estimate where the step is not taken.
        vectors: the steps, [B, P].
        deviation: that they give, [B, K].
        taken: where they are taken, [B].
    """

    cautious: Estimate
    vectors: Tensor
    deviation: Tensor
    taken: Tensor


class NewtonStep:
    """The rule for the examples of a session.

    Where what remains is not positive definite, or the step is far longer than that of
    ``corrected``, the latter is kept. Where S is known in some directions only, what is in the
    latter's place is too short for examples that bring most of the curvature along it: of these,
    a step that is far longer is shortened.

    Args:
        opened: model, data and likelihood.
        posterior: with the exact Hessian.
    """

    def __init__(self, opened: Session, posterior: Posterior) -> None:
        check_own_hessians(posterior)
        self.opened, self.posterior = opened, posterior
        self.layout: Layout = covered_layout(posterior)
        block = posterior.blocks[0]
        self.kept = block if isinstance(block, LowRankBlock) else None

    def __call__(self, observed: Observed, setting: Setting) -> Estimate:
        """d of every example of a batch."""
        found = self._decided(observed, setting)
        taken = found.taken[:, None]
        deviation = torch.where(taken, found.deviation, found.cautious.deviation)
        change, loo_loss = displaced(
            setting.likelihood, observed.outputs, observed.targets, deviation
        )
        return replace(
            found.cautious,
            deviation=deviation,
            prediction_deviation=change,
            loo_loss=loo_loss,
            pull=None,
        )

    def step(self, observed: Observed, setting: Setting) -> tuple[Named, bool, bool]:
        """The step of the parameters for one example, whether it is Newton's, and the flag."""
        found = self._decided(observed, setting)
        flagged, taken = bool(found.cautious.flagged[0]), bool(found.taken[0])
        if taken:
            return self._first(found.vectors), taken, flagged
        assert found.cautious.pull is not None
        pulled = observed.trace.own_gradient_rows(found.cautious.pull, self.layout)
        return self.posterior.solve(self._first(pulled)), taken, flagged

    def _first(self, rows: Tensor) -> Named:
        return {name: value[0] for name, value in self.layout.unflatten(rows).items()}

    def _decided(self, observed: Observed, setting: Setting) -> Decided:
        if self.kept is None:
            cautious = corrected(observed, setting)
            own_share = torch.zeros_like(cautious.loo_loss)
        else:
            cautious, own_share = cautious_step(observed, setting)
        solution = self._solve(observed)
        steps = self.layout.unflatten(solution.vectors)
        deviation = observed.trace.own_tangents(steps)
        gain = (observed.residual * deviation).sum(1)
        largest = LARGEST_GAIN * (observed.residual * cautious.deviation).sum(1)
        solved = ~solution.indefinite & (solution.residual <= TOLERANCE)
        long = solved & (gain > largest) & (own_share > MOSTLY_OWN)
        scale = torch.where(long, largest / gain, 1.0)[:, None]
        taken = long | (solved & (gain >= 0) & (gain <= largest))  # false for NaN too
        return Decided(cautious, scale * solution.vectors, scale * deviation, taken)

    def _solve(self, observed: Observed) -> Solution:
        """(S - H_i)^-1 grad loss_i of every example."""
        right = observed.trace.own_gradient_rows(observed.residual, self.layout)

        def own(vectors: Tensor, rows: Tensor) -> Tensor:
            return per_example_hessian_products(
                self.opened.model,
                self.opened.likelihood,
                observed.batch.select(rows.cpu()),
                observed.targets[rows],
                self.layout.unflatten(vectors.to(right)),
            ).to(vectors)

        return solve_without(self.posterior, own, right)
