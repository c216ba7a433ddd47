"""Which positions of a batch gradients arrive at.

A padded position, or a token that the pooled state does not come from, has no gradient in any
output vector: it adds nothing to the curvature, and its input must not count in the mean input of a
layer. Else the factors of a sequence would depend on what it was padded to.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engram.engine.passes import Trace
from engram.engine.rules.base import Call


class Reached:
    """The positions of every site that gradients have arrived at so far.

    Args:
        trace: of the batch.
    """

    def __init__(self, trace: Trace) -> None:
        self.sites = trace.sites
        self._masks: list[Tensor | None] = [None] * len(trace.sites)  # [B, T]
        self._open = {n for n, s in enumerate(self.sites) if s.rule.kronecker_roles}

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Note where the gradients of one output vector arrive."""
        for number in list(self._open):
            gradient, site = gradients[number], self.sites[number]
            if gradient is None:
                continue
            found = site.rule.reached(site.call, gradient)
            before = self._masks[number]
            if found is not None and before is not None:
                found = found | before
            if found is None or bool(found.all()):  # as nearly always
                self._masks[number] = None
                self._open.discard(number)
            else:
                self._masks[number] = found

    def call(self, number: int) -> Call:
        """The call of a site at those positions; of an example without any, at all of them."""
        site, mask = self.sites[number], self._masks[number]
        if mask is None:
            return site.call
        return site.call.at_positions(mask | ~mask.any(1, keepdim=True))
