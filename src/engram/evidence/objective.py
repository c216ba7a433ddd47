r"""The Hessian of the objective, :math:`H = \sum_i H_i + \delta I`, and the S in its place."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.parameters import Layout, trainable
from engram.curvature.products import batch_hessian_times, hessian_times
from engram.engine.session import Session
from engram.posteriors.gaussian import Posterior


class Objective:
    """Gradients and curvature over the parameters that a posterior covers, as flat vectors."""

    def __init__(self, opened: Session, posterior: Posterior, prior_share: float = 1.0) -> None:
        """``prior_share`` times the posterior's delta is that of the training."""
        self.opened, self.posterior = opened, posterior
        covered = posterior.block_of
        self.parameters = {n: p for n, p in trainable(opened.model).items() if n in covered}
        self.layout = Layout.of(self.parameters)
        self.prior = torch.cat(
            [torch.full_like(p, posterior.prior_of(n)).flatten() for n, p in self._detached()]
        )
        self.prior = prior_share * self.prior

    def _detached(self) -> list[tuple[str, Tensor]]:
        return [(name, p.detach()) for name, p in self.parameters.items()]

    def hessian_times(self, vectors: Tensor) -> Tensor:
        """H v for every row, [C, P]."""
        found = hessian_times(self.opened, self.parameters, self.layout.unflatten(vectors))
        return self.layout.flatten(found) + self.prior * vectors

    def own_hessian_times(self, index: int, vector: Tensor) -> Tensor:
        """H_i v of one example, [P]."""
        batch = self.opened.batches.take(torch.tensor([index]))
        vectors = self.layout.unflatten(vector[None])
        found = batch_hessian_times(self.opened, self.parameters, vectors, batch)
        return self.layout.flatten(found)[0]

    def solve(self, vectors: Tensor) -> Tensor:
        """S^-1 v for every row."""
        return self.layout.flatten(self.posterior.solve(self.layout.unflatten(vectors)))

    def multiply(self, vectors: Tensor) -> Tensor:
        """S v for every row."""
        return self.layout.flatten(self.posterior.multiply(self.layout.unflatten(vectors)))

    def gradients(self, indices: Tensor) -> Tensor:
        """Gradient of the loss of each of these examples, [C, P]."""
        rows = []
        for observed in self.opened.passes("gradients", indices, 1):
            pulled = self.opened.pull_back(observed.batch, observed.residual, self.parameters)
            rows.append(self.layout.flatten(pulled))
        return torch.stack(rows)
