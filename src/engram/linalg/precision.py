r"""A precision in blocks: all that the passes of the engine know of a posterior.

.. math:: S = \mathrm{blockdiag}(S_1, \dots, S_B)

Each block is over some parameters; a parameter in no block counts as fixed.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from engram.core.parameters import Layout, Named
from engram.core.storage.values import variants
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.linalg.low_rank import LowRankBlock

BLOCKS = {
    "diagonal": DiagonalBlock,
    "kronecker": KroneckerBlock,
    "dense": DenseBlock,
    "low_rank": LowRankBlock,
}
variants(Block, BLOCKS)  # where a field is annotated with Block, any of these is saved and read


class Precision(ABC):
    """The precision S over named parameters, for whatever holds it as blocks.

    Attributes:
        blocks: S, block by block, no parameter in two of them.
    """

    blocks: tuple[Block, ...]

    @cached_property
    def block_of(self) -> dict[str, Block]:
        """The block of each covered parameter."""
        return {name: block for block in self.blocks for name in block.names}

    @property
    def is_partial(self) -> bool:
        """Whether S is exact in some directions only, and isotropic in the others."""
        return all(block.is_partial for block in self.blocks)

    def solve(self, vectors: Mapping[str, Tensor]) -> Named:
        """S^-1 v by name, [..., *shape]; parameters that are fixed get zeros.

        A block is solved when all its parameters are given.
        """
        return self._by_block(vectors, "solve")

    def multiply(self, vectors: Mapping[str, Tensor]) -> Named:
        """S v by name."""
        return self._by_block(vectors, "multiply")

    def _by_block(self, vectors: Mapping[str, Tensor], method: str) -> Named:
        result = {name: torch.zeros_like(v) for name, v in vectors.items()}
        for block in self.blocks:
            given = [name for name in block.names if name in vectors]
            if not given:
                continue
            result |= getattr(block, method)({name: vectors[name] for name in block.names})
        return result

    def solve_rows(self, rows: Tensor, layout: Layout) -> Tensor:
        """S^-1 v for rows [M, P] in the order of a layout."""
        return layout.flatten(self.solve(layout.unflatten(rows)))

    def multiply_rows(self, rows: Tensor, layout: Layout) -> Tensor:
        """S v for rows [M, P] in the order of a layout."""
        return layout.flatten(self.multiply(layout.unflatten(rows)))

    def log_det(self) -> float:
        """log |S|."""
        return sum(block.log_det() for block in self.blocks)
