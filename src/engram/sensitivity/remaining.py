"""The precision of the data that remains when a group is left out, and solving with it."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.curvature.exact import ExactCurvature
from engram.curvature.kinds import Curvature
from engram.engine.session import Observed, Session
from engram.parameters import Named, inner, square_norm, trainable
from engram.posteriors.blocks import DenseBlock
from engram.posteriors.gaussian import Posterior
from engram.posteriors.low_rank import LowRankBlock
from engram.posteriors.traces import covered_layout, prior_vector

LARGEST_ITERATION = 200


def has_low_rank(posterior: Posterior) -> bool:
    """Whether the precision is exact in some directions only, and exact products complete it."""
    return all(isinstance(block, LowRankBlock) for block in posterior.blocks)


def has_dense_hessian(posterior: Posterior) -> bool:
    """Whether the precision is a whole matrix of Hessians, wherever they were taken."""
    dense = all(isinstance(block, DenseBlock) for block in posterior.blocks)
    return dense and posterior.curvature is Curvature.HESSIAN


class LeftOut:
    """The left-out examples: their weighted gradient and curvature."""

    def __init__(
        self, opened: Session, posterior: Posterior, chosen: Tensor, shares: Tensor
    ) -> None:
        self.opened, self.posterior, self.chosen = opened, posterior, chosen
        self.share_of = dict(zip(chosen.tolist(), shares.tolist(), strict=True))
        self.parameters = {
            n: p for n, p in trainable(opened.model).items() if n in posterior.block_of
        }
        self.low_rank = has_low_rank(posterior)
        self.swapped = self.low_rank or has_dense_hessian(posterior)

    def _shares(self, indices: Tensor, like: Tensor) -> Tensor:
        return torch.tensor([self.share_of[int(i)] for i in indices], dtype=torch.float64).to(like)[
            :, None
        ]

    def _pulled_back(self, observed: Observed, seed: Tensor) -> Named:
        return self.opened.pull_back(observed.batch, seed, self.parameters)

    def gradient(self) -> Named:
        """sum_j eps_j grad loss_j."""
        total = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        for observed in self.opened.passes("gradient of the group", self.chosen):
            seed = self._shares(observed.batch.indices, observed.residual) * observed.residual
            for name, value in self._pulled_back(observed, seed).items():
                total[name] += value
        return total

    def curvature_times(self, vector: Named) -> Named:
        """sum_j eps_j J_j' Lambda_j J_j v."""
        total = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        for observed in self.opened.passes("curvature of the group", self.chosen):
            moved = observed.trace.tangent(vector)
            weighted = self.opened.likelihood.hessian_times(
                observed.outputs, observed.targets, moved
            )
            seed = self._shares(observed.batch.indices, weighted) * weighted
            for name, value in self._pulled_back(observed, seed).items():
                total[name] += value
        return total

    def whole_times(self, vector: Named) -> Named:
        """S v; the exact Gauss-Newton matrix in place of the Hessian, and of a low-rank precision.

        Without a group the Hessian at the present weights need not be positive definite, and
        without its Gauss-Newton part alone even less so: classes of digits came out up to eight
        times too large. Every remaining example's Gauss-Newton matrix is positive.
        """
        if not self.swapped:
            return self.posterior.multiply(vector)
        layout = covered_layout(self.posterior)
        flat = layout.flatten(vector)
        prior = prior_vector(self.posterior, layout).to(flat)
        exact = ExactCurvature(self.opened, layout, "ggn")
        return layout.unflatten(self.posterior.scale * (exact.times(flat[None])[0] + prior * flat))

    def solve_remaining(self, right: Named) -> tuple[Named, bool]:
        """(S - curvature of the group)^-1 right, by conjugate gradients preconditioned with S.

        Where the remaining precision is not positive in some direction, the solution so far is
        returned and flagged: never an exploding number.
        """
        solution = {n: torch.zeros_like(v) for n, v in right.items()}
        residual = dict(right)
        conditioned = self.posterior.solve(residual)
        direction = dict(conditioned)
        square = first = inner(residual, conditioned)
        double = next(iter(right.values())).dtype == torch.float64
        tolerance = 1e-28 if double and not self.low_rank else 1e-9
        prior = 0.01 * min(self.posterior.prior_of(name) for name in right)
        for iteration in range(LARGEST_ITERATION):
            if square <= tolerance * first:
                break
            full = self.whole_times(direction)
            taken = self.curvature_times(direction)
            image = {n: full[n] - taken[n] for n in full}
            curvature = inner(direction, image)
            # whatever data remains, the precision should not fall far below the prior's
            if curvature <= prior * square_norm(direction):
                return (conditioned if iteration == 0 else solution), True
            step = square / curvature
            solution = {n: solution[n] + step * direction[n] for n in solution}
            residual = {n: residual[n] - step * image[n] for n in residual}
            conditioned = self.posterior.solve(residual)
            before, square = square, inner(residual, conditioned)
            direction = {n: conditioned[n] + square / before * direction[n] for n in direction}
        return solution, square > 1e-6 * first
