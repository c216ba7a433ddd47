r"""How far each example's parameters are from those of training, from checkpoint to checkpoint.

Without example i training would have ended elsewhere. The difference D of the two trainings obeys,
over a stretch of training with mean curvature A and training time k in the eigenbasis of a block,

.. math:: D \leftarrow e^{-k A} D + \frac{1 - e^{-k A}}{A} \frac{J_i' u_i}{N}

A :class:`.Drift` holds the two factors of a stretch; what is kept of D is in :mod:`.carried`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engram.engine.carried import Carried, Explicit, Members, Positions, carried_for
from engram.engine.drift import Drifts
from engram.engine.sites import Site, SiteGroup, group_sites
from engram.linalg.precision import Precision


class Displacements:
    """D of every example of a batch, from the first checkpoint on.

    Args:
        basis: blocks whose eigenbases are those of all drifts; parameters in no block stay put.
    """

    def __init__(self, basis: Precision) -> None:
        self.basis = basis
        self._groups: list[tuple[SiteGroup, Carried]] = []

    def absorb(self, sites: Sequence[Site], gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients J'u at the sites of a checkpoint, for the drifts that follow."""
        for group, carried in self._of(sites):
            carried.absorb(_members(group, sites, gradients))

    def moved(
        self, sites: Sequence[Site], gradients: Sequence[Tensor | None], drift: Drifts | None
    ) -> list[Tensor | None]:
        """Changes of the sites' outputs by D, after a drift where one is given.

        Args:
            sites: of the checkpoint where the outputs are.
            gradients: at them: what none arrives at moves nothing.
            drift: that acts with the gradients absorbed last; None for D as it is.
        """
        result: list[Tensor | None] = [None] * len(sites)
        for group, carried in self._of(sites):
            members = _members(group, sites, gradients)
            found = carried.outputs(members) if drift is None else carried.moved(members, drift)
            for position, value in zip(group.positions, found, strict=True):
                result[position] = value
        return result

    def advance(self, drift: Drifts) -> None:
        """Let a drift act, with the gradients absorbed last."""
        for _, carried in self._groups:
            carried.advance(drift)

    def _of(self, sites: Sequence[Site]) -> list[tuple[SiteGroup, Carried]]:
        if not self._groups:
            groups = group_sites(sites, self.basis)
            self._groups = [(group, carried_for(group, sites)) for group in groups]
        return self._groups


def _members(
    group: SiteGroup, sites: Sequence[Site], gradients: Sequence[Tensor | None]
) -> Members:
    return [(sites[position], gradients[position]) for position in group.positions]


def entries_carried(sites: Sequence[Site], basis: Precision) -> int:
    """Numbers that are kept of D for one example, where it is kept as it is."""
    found = 0
    for group in group_sites(sites, basis):
        if isinstance(carried_for(group, sites), (Explicit, Positions)):
            found += sum(block.layout.num_params for block in group.blocks)
    return found
