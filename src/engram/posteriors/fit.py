"""One fit of a posterior under way: passes over the data with the gradients that it sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import trainable
from engram.core.progress import Pace
from engram.core.selection import spread
from engram.curvature.ggn_roots import ggn_roots
from engram.curvature.moments import SquareMoments
from engram.engine.session import Observed, Session
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.posteriors.tolerance import sampled_share

SPREAD = 256  # examples by which it is decided how much is sampled
Gradients = Sequence[Tensor | None]
QUICKER = 'curvature="fisher" takes one for a batch, with one sampled label per example'


class Fit:
    """One fit under way: the session and its settings."""

    def __init__(
        self, session: Session, delta: float, curvature: str, seed: int, tolerance: float = 0.0
    ) -> None:
        self.session, self.delta, self.curvature, self.seed = session, delta, curvature, seed
        self.sampled_share = sampled_share(tolerance)
        self.parameters = trainable(session.model)
        self.dtype = next(iter(self.parameters.values())).dtype
        self.structure: str | None = None  # what was taken in place of the one asked for
        self.record: dict[str, Any] = {}

    def passes(self, description: str, each: Callable[[Observed, Gradients, int], None]) -> None:
        """Call ``each`` with the gradients of every output vector of every batch."""
        likelihood, count = self.session.likelihood, self.num_leading
        pace: Pace | None = None
        for observed in self.session.passes(description):
            vectors = ggn_roots(observed, likelihood, self.curvature, self.seed, count)
            number = vectors.shape[2]
            if pace is None:
                batches = -(-self.session.batches.num_data // len(observed.batch))
                pace = Pace(number * batches, "backward passes over batches", QUICKER)
            with torch.no_grad():
                for r in range(number):
                    each(observed, observed.trace.arranged(vectors[:, :, r].contiguous()), r)
                    pace.step()

    @cached_property
    def num_leading(self) -> int | None:
        """Outputs of every example that are taken exactly; None where all are.

        From examples spread over the data, so that no batch decides about its own.
        """
        if self.curvature != "ggn" or self.sampled_share == 0:
            return None
        num_data = self.session.batches.num_data
        outputs = [o.outputs for o in self.session.passes("outputs", spread(num_data, SPREAD))]
        return self.session.likelihood.num_leading(torch.cat(outputs), self.sampled_share)

    def square_moments(
        self, names: set[str], blocks: Sequence[KroneckerBlock] = ()
    ) -> SquareMoments:
        """Squared gradients of these parameters over the data."""
        moments = SquareMoments(blocks)
        self.passes("curvature", lambda o, g, r: moments.update(o.trace, g, names))
        return moments

    def diagonal(self, moments: SquareMoments, names: Sequence[str]) -> tuple[DiagonalBlock, ...]:
        """Diagonal blocks; a parameter that no output depends on keeps the prior's precision."""
        blocks = []
        for name in names:
            zeros = wide(torch.zeros_like(self.parameters[name]))
            precision = moments.by_name.get(name, zeros) + self.delta
            blocks.append(DiagonalBlock.of(name, precision.to(self.dtype)))
        return tuple(blocks)
