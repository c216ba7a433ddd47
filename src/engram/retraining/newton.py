"""The Newton recipe: one Hessian for all copies, and step control for those it does not serve."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.data.batches import Data
from engram.likelihoods import Likelihood
from engram.linalg.gcr import WIDTH, BlockGCR
from engram.linalg.lbfgs import Apply, Base, LBFGSMemory
from engram.posteriors.convert import as_posterior
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import laplace
from engram.retraining.chord import follow
from engram.retraining.hessian_at import HessianAt
from engram.retraining.in_single import in_single
from engram.retraining.layer_hessians import sharpened
from engram.retraining.quasi_newton import Objective, Progress, begin, minimise
from engram.retraining.recipe import (
    Recipe,
    Report,
    Trained,
    check_counts,
    check_positive,
    wanted_norms,
)
from engram.retraining.stack import Stack

DENSE_PARAMETERS = 2500  # up to here Newton fits a full precision, beyond a Kronecker one
PRODUCTS_PER_COPY = 10  # with the Hessian that all copies share, at most
MANY_COPIES = 24  # from here on, Hessians of the layers are worth their time
FEWEST_PRODUCTS = 120  # that are allowed however few the copies are


@dataclass(frozen=True)
class Newton(Recipe):
    """Newton-like steps with the posterior's covariance and one Hessian that the copies share.

    Copies that leave out little share nearly the same Hessian, the one where they all start. It is
    inverted for all of them at once, by block generalised conjugate residuals preconditioned with
    the posterior: a direction whose product with the Hessian is known serves every copy, and every
    later step. What a copy leaves out is taken from that Hessian exactly, as the change of those
    examples' gradient. For many copies the posterior is sharpened with the Hessians of the linear
    layers. A copy for which such steps do not pay, and copies that leave out large groups, go on
    with the posterior (sharpened or not), their own pairs of steps and gradient changes, and step
    control.

    Args:
        posterior: of the trained model, for the refit with everything; fitted when not given, with
            a full precision up to 2500 parameters and a Kronecker-factored one beyond. For the
            left-out copies it is fitted again at that refit.
        tolerance, iterations, history: as in :class:`LBFGS`.
    """

    posterior: Posterior | Any | None = field(default=None)
    tolerance: float = 1e-2
    iterations: int = 500
    history: int = 20
    converges = True

    def __post_init__(self) -> None:
        check_positive(self, tolerance=self.tolerance)
        check_counts(self, iterations=self.iterations, history=self.history)

    def bind(
        self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float, progress: bool
    ) -> Newton:
        if self.posterior is not None:
            posterior = as_posterior(self.posterior, model)
            posterior.check_likelihood(likelihood)
            return replace(self, posterior=posterior)
        return replace(self, posterior=_fitted(model, data, likelihood, prior, progress))

    def rebind(self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float) -> Newton:
        if isinstance(self.posterior, Posterior) and self.posterior.structure == "low_rank":
            return self  # dear to fit, and as good a preconditioner a small step away
        return replace(self, posterior=_fitted(model, data, likelihood, prior, False))

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        wanted = wanted_norms(objective, start, self.tolerance)
        solve, state = self._solve_with(objective.stack), begin(objective, start)
        pairs: list[tuple[Tensor, Tensor]] = []
        if objective.shareable:
            try:
                sharper = self._sharpened(objective.stack, start, solve)
                pairs, solve = self._together(objective, state, wanted, sharper, report), sharper
            except RuntimeError as error:  # no second derivative: each copy by its own gradients
                if "is not implemented" not in str(error):
                    raise
                state = begin(objective, start)
        behind = state.moving.nonzero()[:, 0]
        if len(behind):
            part, own = state.only(behind), LBFGSMemory(start[: len(behind)], self.history)
            for move, change in pairs:
                every = torch.arange(len(behind))
                own.add(every, move[behind], change[behind], solve(change[behind]))
            rest = objective.only(behind), part, wanted[behind]
            minimise(*rest, self.iterations, own, Base(solve), report)
            state.take(behind, part)
        return Trained(state.flat, state.norm, wanted, state.evaluations)

    def _together(
        self, objective: Objective, state: Progress, wanted: Tensor, solve: Apply, report: Report
    ) -> list[tuple[Tensor, Tensor]]:
        """All copies by what they share, as far as that goes; the pairs it leaves."""
        start = state.flat.clone()
        allowed = max(PRODUCTS_PER_COPY * len(start), FEWEST_PRODUCTS)
        capacity = min(allowed, start.shape[1])
        shared = BlockGCR(solve, _products(objective.stack, start), start, capacity)
        return follow(objective, state, wanted, shared, report)

    def _sharpened(self, stack: Stack, start: Tensor, solve: Apply) -> Apply:
        if len(start) < MANY_COPIES:
            return solve
        assert isinstance(self.posterior, Posterior)
        return sharpened(stack, start[0], self.posterior, solve)

    def _solve_with(self, stack: Stack) -> Apply:
        posterior = self.posterior
        assert isinstance(posterior, Posterior)
        block = posterior.blocks[0] if posterior.blocks else None
        if block is not None and block.names == stack.layout.names:
            # one product with the inverse takes a tenth of the time of two triangular solves
            inverse = block.dense_inverse()
            if inverse is not None:
                matrix = inverse.to(stack.start)
                return lambda rows: rows.to(matrix) @ matrix
        covered = posterior.block_of

        def solve(rows: Tensor) -> Tensor:
            vectors = stack.layout.unflatten(rows)
            solved = posterior.solve(vectors)
            for name in vectors:
                if name not in covered:  # no precision known: the prior's
                    solved[name] = vectors[name] / posterior.prior_precision
            return stack.layout.flatten(solved)

        return solve


def _products(stack: Stack, start: Tensor) -> Apply:
    """H v at the copies' common start, in single precision: what they reach is seen in double."""
    single = in_single(stack)
    at = start[0].to(single.start)
    hessian = HessianAt(single, at, min(WIDTH, len(start)))
    return lambda rows: hessian(rows.to(at)).to(rows)


def _fitted(
    model: nn.Module, data: Data, likelihood: Likelihood, prior: float, progress: bool
) -> Posterior:
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return laplace(
        model,
        data,
        likelihood=likelihood,
        structure="full" if entries <= DENSE_PARAMETERS else "kronecker",
        prior_precision=prior,
        progress=progress,
    )
