"""The examples that an update looks at: all of them, or some that are chosen once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.arguments import whole
from engram.core.data.batches import Data
from engram.core.data.parts import part_of
from engram.errors import ArgumentError
from engram.sensitivity.result import Result

SEED = 0  # of the choice: a tracker that is made again looks at the same ones


@dataclass(frozen=True)
class LookedAt:
    """Which of the examples are passed over at an update.

    Args:
        num_data: N, all examples.
        indices: those that are looked at, in order; None for all.
    """

    num_data: int
    indices: Tensor | None = None

    @classmethod
    def some(cls, num_data: int, wanted: int | None) -> LookedAt:
        """So many of them, at random; all where none are asked for, or as many."""
        if wanted is None:
            return cls(num_data)
        count = whole("examples", wanted, remedy="use 2000, or leave it out for all")
        if count >= num_data:
            return cls(num_data)
        generator = torch.Generator().manual_seed(SEED)
        return cls(num_data, torch.randperm(num_data, generator=generator)[:count].sort().values)

    def data(self, data: Data) -> Data:
        """Those of the data."""
        return data if self.indices is None else part_of(data, self.indices)

    def placed(self, result: Result) -> Result:
        """A result with their positions in all data."""
        if self.indices is None:
            return result
        return replace(result, indices=self.indices[result.indices])

    def column(self, values: Tensor) -> Tensor:
        """A column of their result for all examples, [N]; NaN for those that were not looked at."""
        if self.indices is None:
            return values
        found = torch.full((self.num_data,), math.nan, dtype=values.dtype)
        found[self.indices] = values
        return found

    def check(self, estimator: str) -> None:
        """ArgumentError for the walk along the training, which takes all examples for N."""
        if self.indices is not None and estimator == "trajectory":
            raise ArgumentError(
                'estimator="trajectory" with all examples',
                f"{len(self.indices):,} of {self.num_data:,}",
                "leave out examples=, or take another estimator",
            )
