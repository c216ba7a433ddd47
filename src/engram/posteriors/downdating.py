"""Kronecker factors without some examples: each example, or a group, has those of the others.

How an example is taken out of a factor is said in :mod:`engram.linalg.kronecker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from engram.linalg.block import Block
from engram.posteriors.gaussian import Posterior


def can_be_downdated(posterior: Posterior) -> bool:
    """Whether some layer's factors are known as such."""
    return any(block.knows_inputs for block in posterior.blocks)


def downdated(posterior: Posterior) -> Posterior:
    """The same posterior, with every example left out of the factors that its gradient meets."""
    blocks = (block.without_own_input(_prior(block, posterior)) for block in posterior.blocks)
    return replace(posterior, blocks=tuple(blocks))


def without_inputs(
    posterior: Posterior, taken: Mapping[tuple[str, ...], Tensor]
) -> tuple[Posterior, float]:
    r"""The same posterior without some inputs: :math:`R \otimes (\sum_j c_j c_j' - T) + \delta`.

    Args:
        taken: T, the squares of the inputs that are left out, [I, I] by the names of the block.

    Returns:
        The posterior, and the smallest eigenvalue of a factor over its largest: below 0 where
        more was taken out than was in it, which is held at 0.
    """
    blocks: list[Block] = []
    lowest = 0.0
    for block in posterior.blocks:
        if block.names in taken:
            block, own = block.without_inputs(taken[block.names], _prior(block, posterior))
            lowest = min(lowest, own)
        blocks.append(block)
    return replace(posterior, blocks=tuple(blocks)), lowest


def _prior(block: Block, posterior: Posterior) -> float:
    """The precision that is left in any direction of a block, whatever data is taken out."""
    return min(posterior.prior_of(name) for name in block.names)
