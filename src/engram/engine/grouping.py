"""Sites that share a block of the precision, or a tied weight: they are solved together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engram.engine.sites import Site
from engram.linalg.block import Block, MatrixBlock
from engram.linalg.precision import Precision


@dataclass(frozen=True)
class SiteGroup:
    """Sites solved together, by their positions, and the blocks that cover them."""

    positions: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def matrices(self) -> list[MatrixBlock]:
        """The blocks where each of them is over one weight matrix; none where one is not."""
        return matrix_blocks(self.blocks)


def matrix_blocks(blocks: Sequence[Block]) -> list[MatrixBlock]:
    """All of them where each is over one weight matrix; none where one is not."""
    found = [block.as_matrix for block in blocks]
    known = [block for block in found if block is not None]
    return known if len(known) == len(found) else []


def group_sites(sites: Sequence[Site], precision: Precision) -> list[SiteGroup]:
    """Sites joined wherever they share a block or a parameter; sites with no block are left out."""
    groups: list[tuple[set[int], set[str], list[Block]]] = []
    for position, site in enumerate(sites):
        blocks = _blocks_of(site, precision)
        if not blocks:
            continue
        names = {name for block in blocks for name in block.names} | set(site.names)
        positions = {position}
        for other in [g for g in groups if g[1] & names]:
            groups.remove(other)
            positions |= other[0]
            names |= other[1]
            blocks += [b for b in other[2] if all(b is not mine for mine in blocks)]
        groups.append((positions, names, blocks))
    return [SiteGroup(tuple(sorted(p)), tuple(b)) for p, _, b in groups]


def _blocks_of(site: Site, precision: Precision) -> list[Block]:
    found: list[Block] = []
    for name in site.names:
        block = precision.block_of.get(name)
        if block is not None and all(block is not b for b in found):
            found.append(block)
    return found
