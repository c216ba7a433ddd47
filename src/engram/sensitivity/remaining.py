"""A group that is left out: its gradient, its curvature, and its part in Kronecker factors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import Named, inner, square_norm, trainable
from engram.curvature.operators import CurvatureOperator
from engram.curvature.products import batch_hessian_times
from engram.engine.grouping import matrix_blocks
from engram.engine.session import Observed, Session
from engram.engine.steps import is_rank_one
from engram.posteriors.gaussian import Posterior
from engram.posteriors.trace_estimation import covered_layout, prior_vector

LARGEST_ITERATION = 200
Times = Callable[[Named], Named]


def has_low_rank(posterior: Posterior) -> bool:
    """Whether the precision is exact in some directions only, and exact products complete it."""
    return all(block.is_partial for block in posterior.blocks)


class LeftOut:
    """The left-out examples: their weighted gradient and curvature."""

    def __init__(
        self, opened: Session, posterior: Posterior, chosen: Tensor, shares: Tensor
    ) -> None:
        self.opened, self.posterior = opened, posterior
        # in one order, so that the order they are named in does not matter
        self.chosen, order = chosen.sort()
        self.share_of = dict(zip(self.chosen.tolist(), shares[order].tolist(), strict=True))
        self.parameters = {
            n: p for n, p in trainable(opened.model).items() if n in posterior.block_of
        }

    @property
    def largest_share(self) -> float:
        """Of the examples, as much as is taken out of any."""
        return max(self.share_of.values())

    def outweighs(self, step: Named, gradient: Named) -> bool:
        """Whether weights beyond 1 have more curvature along the step S^-1 g than all data.

        Then a first-order step says nothing: the group's own curvature is what it leaves out. With
        overflow there is no telling, and that is a yes.
        """
        if max(abs(share) for share in self.share_of.values()) <= 1:
            return False
        own, whole = inner(step, self.gauss_newton_times(step)), inner(step, gradient)
        return not abs(own) <= whole < math.inf

    def _shares(self, indices: Tensor, like: Tensor) -> Tensor:
        return torch.tensor([self.share_of[int(i)] for i in indices], dtype=torch.float64).to(like)[
            :, None
        ]

    def _pulled_back(self, observed: Observed, seed: Tensor) -> Named:
        return self.opened.pull_back(observed.batch, seed, self.parameters)

    def _zeros(self) -> Named:
        return {n: torch.zeros_like(p) for n, p in self.parameters.items()}

    def gradient(self) -> Named:
        """sum_j eps_j grad loss_j."""
        total = self._zeros()
        for observed in self.opened.passes("gradient of the group", self.chosen):
            seed = self._shares(observed.batch.indices, observed.residual) * observed.residual
            for name, value in self._pulled_back(observed, seed).items():
                total[name] += value
        return total

    def gauss_newton_times(self, vector: Named) -> Named:
        """sum_j eps_j J_j' Lambda_j J_j v."""
        total = self._zeros()
        for observed in self.opened.passes("curvature of the group", self.chosen):
            moved = observed.trace.tangent(vector)
            weighted = self.opened.likelihood.hessian_times(
                observed.outputs, observed.targets, moved
            )
            seed = self._shares(observed.batch.indices, weighted) * weighted
            for name, value in self._pulled_back(observed, seed).items():
                total[name] += value
        return total

    def hessian_times(self, vector: Named) -> Named:
        """sum_j eps_j H_j v."""
        total, rows = self._zeros(), {name: v[None] for name, v in vector.items()}
        for batch in self.opened.batches.subset(self.chosen, self.opened.largest_part):
            shares = self._shares(batch.indices, next(iter(vector.values())))[:, 0]
            found = batch_hessian_times(self.opened, self.parameters, rows, batch, shares)
            for name, value in found.items():
                total[name] += value[0]
        return total

    def all_gauss_newton_times(self, vector: Named) -> Named:
        """The exact Gauss-Newton matrix of all data and the prior, times v, at the scale of S."""
        layout = covered_layout(self.posterior)
        flat = layout.flatten(vector)
        prior = prior_vector(self.posterior, layout).to(flat)
        exact = CurvatureOperator(self.opened, layout, "ggn")
        return layout.unflatten(self.posterior.scale * (exact.times(flat[None])[0] + prior * flat))

    def inputs(self) -> dict[tuple[str, ...], Tensor]:
        """sum_j eps_j c_j c_j' of every Kronecker block whose layer acts at one position, [I, I].

        Where a layer acts at many positions, factors are left as they are, as for single examples.
        """
        total: dict[tuple[str, ...], Tensor] = {}
        for observed in self.opened.passes("inputs of the group", self.chosen):
            for site in observed.trace.sites:
                block = self.posterior.block_of.get(site.names[0])
                if block is None or not block.knows_inputs:
                    continue
                if not is_rank_one(site, matrix_blocks([block])):
                    continue
                columns = wide(site.call.input.reshape(len(observed.outputs), -1))
                if len(block.names) == 2:
                    columns = torch.cat([columns, torch.ones_like(columns[:, :1])], dim=1)
                shares = self._shares(observed.batch.indices, columns)
                square = columns.mT @ (shares * columns)
                total[block.names] = total.get(block.names, 0) + square
        return total

    def solve_remaining(self, whole_times: Times, right: Named) -> tuple[Named, bool]:
        """(M - the group's Gauss-Newton matrix)^-1 right, by conjugate gradients with S^-1.

        Where what remains is not positive in some direction, the solution so far is returned and
        flagged: never an exploding number.

        Args:
            whole_times: products with M, the precision of all data.
        """
        solution = {n: torch.zeros_like(v) for n, v in right.items()}
        residual = dict(right)
        conditioned = self.posterior.solve(residual)
        direction = dict(conditioned)
        square = first = inner(residual, conditioned)
        if not math.isfinite(first):  # weights so large that their squares overflow
            return conditioned, True
        double = next(iter(right.values())).dtype == torch.float64
        tolerance = 1e-28 if double and not has_low_rank(self.posterior) else 1e-9
        prior = 0.01 * min(self.posterior.prior_of(name) for name in right)
        for iteration in range(LARGEST_ITERATION):
            if square <= tolerance * first:
                break
            full = whole_times(direction)
            taken = self.gauss_newton_times(direction)
            image = {n: full[n] - taken[n] for n in full}
            curvature = inner(direction, image)
            # whatever data remains, the precision should not fall far below the prior's
            if not curvature > prior * square_norm(direction):  # true for NaN too
                return (conditioned if iteration == 0 else solution), True
            step = square / curvature
            solution = {n: solution[n] + step * direction[n] for n in solution}
            residual = {n: residual[n] - step * image[n] for n in residual}
            conditioned = self.posterior.solve(residual)
            before, square = square, inner(residual, conditioned)
            direction = {n: conditioned[n] + square / before * direction[n] for n in direction}
        return solution, not square <= 1e-6 * first
