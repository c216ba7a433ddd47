"""Views of the examples, as a training with augmentation has them.

Such a training never sees an example as it is, and what it learns of a view moves the outputs at
the example itself less. Each view is drawn by itself from seed and example, so that it does not
depend on the batch that the example comes in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engram.core.data.batches import Batch
from engram.core.state.process import random_states, restored
from engram.errors import ArgumentError

Augment = Callable[[Tensor], Tensor]

SEEDS = 2**32  # that numpy takes
REMEDY = (
    "pass what the loop does to a batch of inputs before the model, a function of one tensor of "
    "numbers that keeps its shape"
)


@dataclass(frozen=True)
class Views:
    """Another view of every example.

    Args:
        augment: makes one of a batch of inputs.
        seed: of the draws.
    """

    augment: Augment
    seed: int

    def of(self, batch: Batch) -> Batch:
        """The batch as the training might have had it; the random state is as before."""
        if not isinstance(batch.inputs, tuple) or not batch.inputs[0].is_floating_point():
            got = type(batch.inputs).__name__
            if isinstance(batch.inputs, tuple):
                got = f"inputs of {batch.inputs[0].dtype}"
            raise ArgumentError("a first input of floating point to augment", got, REMEDY)
        first, *others = batch.inputs
        with restored(tuple(random_states())), torch.no_grad():
            parts = [self._one(first[n : n + 1], int(i)) for n, i in enumerate(batch.indices)]
        return replace(batch, inputs=(torch.cat(parts), *others))

    def _one(self, example: Tensor, index: int) -> Tensor:
        seed = hash((self.seed, index)) % SEEDS
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        found = self.augment(example)
        if not isinstance(found, Tensor) or found.shape != example.shape:
            got = str(list(found.shape)) if isinstance(found, Tensor) else type(found).__name__
            raise ArgumentError(f"a view of shape {list(example.shape)} from augment", got, REMEDY)
        return found.to(example)
