"""Which positions of a batch gradients arrive at.

A padded position has no gradient at any layer, in any output vector: it adds nothing to the
curvature, and its input must not count in the mean input of a layer. Else the factors of a sequence
would depend on what it was padded to. A position that gradients reach at some layer counts at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engram.engine.passes import Trace
from engram.engine.rules.base import Call


class Reached:
    """The positions that gradients have arrived at so far, at the layers with as many of them.

    Args:
        trace: of the batch.
    """

    def __init__(self, trace: Trace) -> None:
        self.sites = trace.sites
        self._lengths: dict[int, int] = {}  # positions of a site, by its number
        self._masks: dict[int, Tensor | None] = {}  # [B, T] by T; None where all are reached

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Note where the gradients of one output vector arrive."""
        for number, (site, gradient) in enumerate(zip(self.sites, gradients, strict=True)):
            if gradient is None or not site.rule.counts_positions:
                continue
            count = site.call.num_examples
            length = gradient.numel() // (count * gradient.shape[-1])
            self._lengths[number] = length
            before = self._masks.get(length)
            if length == 1 or (before is None and length in self._masks):  # as nearly always
                continue
            found = gradient.reshape(count, length, -1).abs().amax(2) > 0
            found = found if before is None else found | before
            self._masks[length] = None if bool(found.all()) else found

    def call(self, number: int) -> Call:
        """The call of a site at those positions; of an example without any, at all of them."""
        call = self.sites[number].call
        mask = self._masks.get(self._lengths.get(number, 1))
        if mask is None:
            return call
        return call.at_positions(mask | ~mask.any(1, keepdim=True))
