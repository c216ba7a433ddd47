r"""Kronecker factors without the example in question: each example has the posterior of the others.

A layer's factors say :math:`S = R \otimes \sum_j c_j c_j' + \delta`, with R the mean curvature at
the layer's output and c_j its inputs. Without example i the second factor loses
:math:`c_i c_i'`, and nothing else is needed: in an eigendirection of R with eigenvalue r the gain
:math:`q = c_i' (r \sum_j c_j c_j' + \delta)^{-1} c_i` of a gradient at one position becomes

.. math:: c_i' \Big(r \sum_{j \ne i} c_j c_j' + \delta\Big)^{-1} c_i = \frac{q}{1 - r q}.

What is taken out is in the factor as it stands, so that r q is below 1 and the gain at most
:math:`|c_i|^2 / \delta`, the prior's alone. Subtracting the example's own Gauss-Newton matrix
from S instead takes out what the factors have averaged over all examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.dtypes import eigh, in_double
from engram.linalg.blocks import Block, EigenBlock
from engram.linalg.clustered import ClusteredSpectrum
from engram.posteriors.gaussian import Posterior


@dataclass(frozen=True)
class DowndatedBlock(EigenBlock):
    """A Kronecker block that leaves every example's own input out, at layers with one position.

    Where a layer acts at many positions, no example has much of the factor, and none is taken out.

    Args:
        smallest: precision that is left in any direction, the prior's.
    """

    smallest: float = 0.0

    def rank_one_gain(self, columns: Tensor) -> Tensor:
        """q / (1 - r q), [B, O]."""
        assert self.row_share is not None
        length = columns.square().sum(1, keepdim=True)
        return self._without_own(super().rank_one_gain(columns), self.row_share, length)

    def merged_gains(self, parts: ClusteredSpectrum, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the merged rows together, [B, 1], and what kept ones add, [B, p]."""
        assert self.row_share is not None
        length = columns.square().sum(1, keepdim=True)
        if columns.shape[1] < parts.columns.shape[0]:
            length = length + 1
        every, added = parts.gains(columns)
        kept = parts.rows.shape[1]
        own = self._without_own(every + added, self.row_share[:kept], length)
        if not parts.merged_rows:
            return every, own - every
        every = self._without_own(every, self.row_share[kept:].mean(), length)
        return every, own - every

    def _without_own(self, gain: Tensor, share: Tensor, length: Tensor) -> Tensor:
        """Bounded by the prior's gain, also where merged eigenvalues are not quite consistent."""
        left = 1 - share * gain
        largest = (length / self.smallest).expand_as(gain)
        return torch.where(left * largest > gain, gain / left, largest)


def can_be_downdated(posterior: Posterior) -> bool:
    """Whether some layer's factors are known as such."""
    return any(_has_share(block) for block in posterior.blocks)


def downdated(posterior: Posterior) -> Posterior:
    """The same posterior, with every example left out of the factors that its gradient meets."""
    blocks = tuple(_downdated_block(block, posterior) for block in posterior.blocks)
    return replace(posterior, blocks=blocks)


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
        if isinstance(block, EigenBlock) and block.names in taken:
            block, own = _remaining_block(block, taken[block.names], posterior)
            lowest = min(lowest, own)
        blocks.append(block)
    return replace(posterior, blocks=tuple(blocks)), lowest


def _remaining_block(
    block: EigenBlock, taken: Tensor, posterior: Posterior
) -> tuple[EigenBlock, float]:
    """The second factor without T, in its own eigenbasis, and its smallest eigenvalue."""
    assert block.row_share is not None
    assert block.columns is not None
    prior = min(posterior.prior_of(name) for name in block.names)
    shares, basis = in_double(block.row_share), in_double(block.columns[0])
    largest = int(shares.argmax())
    if not shares[largest] > 0:  # no curvature to take anything from
        return block, 0.0
    values = (in_double(block.precision[0, largest]) - prior).clamp(min=0) / shares[largest]
    left = torch.diag(values) - basis.mT @ in_double(taken) @ basis
    remaining, turn = eigh(0.5 * (left + left.mT))
    precision = shares[:, None] * remaining.clamp(min=0) + prior
    left_out = EigenBlock(
        block.layout,
        precision[None].to(block.precision),
        block.rows,
        (basis @ turn)[None].to(block.columns),
        block.row_share,
    )
    return left_out, float(remaining[0] / values.max().clamp(min=torch.finfo(values.dtype).tiny))


def _has_share(block: Block) -> bool:
    return isinstance(block, EigenBlock) and block.row_share is not None


def _downdated_block(block: Block, posterior: Posterior) -> Block:
    if not isinstance(block, EigenBlock) or block.row_share is None:
        return block
    smallest = min(posterior.prior_of(name) for name in block.names)
    return DowndatedBlock(
        block.layout,
        block.precision,
        block.rows,
        block.columns,
        block.row_share,
        smallest=smallest,
    )
