r"""Gradients that are kept to be multiplied with each other, shortened where they are many entries.

A net of many weights has no room for the gradients of some hundred examples. The rows of a weight
are then added up in groups, each entry with a random sign s beside the root of its training time,

.. math:: z_{h, c} = \sum_{o \in h} s_{oc} \sqrt{T_{oc}} \, g_{oc},

so that products of what is left are those of the gradients in the mean over signs. What they are
off by is that of random directions: the lengths of both over the root of how many entries are left,
and of what lies across all the M others, a share of M over the entries is taken for theirs. Both
are far below what the choice of examples brings with it (docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ENTRIES_KEPT = 2**18  # of a gradient, all parameters together: nets of fewer weights are whole
FEWEST_KEPT = 2**10  # of each parameter: small ones, as biases and norms, are whole
SKETCH_SEED = 0  # of signs: the same parameter, the same sketch


def groups_of(shape: Sequence[int], size: int) -> int:
    """How many groups of about ``size`` rows a parameter is left with; all its rows where few.

    Example:
        >>> groups_of((384, 1536), 80), groups_of((384,), 80), groups_of((30, 10), 1)
        (5, 384, 30)
    """
    rows, width = _matrix(shape)
    return min(rows, max(-(-rows // size), -(-FEWEST_KEPT // width)))


def entries_kept(shapes: Sequence[Sequence[int]], size: int) -> int:
    """Entries of an example's gradient that are kept with groups of this size."""
    return sum(groups_of(shape, size) * _matrix(shape)[1] for shape in shapes)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter's rows, and the entries of each."""
    rows = shape[0] if shape else 1
    return max(rows, 1), max(math.prod(shape[1:]), 1)


@dataclass(frozen=True)
class Sketch:
    """The gradients of one parameter as they are kept.

    Args:
        weights: roots of training times, with signs where rows are added up, [O, I].
        groups: of rows; row o is in group o modulo their number.
    """

    weights: Tensor
    groups: int

    @property
    def entries(self) -> int:
        """That are kept of an example."""
        return self.groups * self.weights.shape[1]

    def of(self, gradients: Tensor) -> Tensor:
        """Of gradients [B, *shape]: [B, entries]."""
        found = gradients.reshape(len(gradients), *self.weights.shape) * self.weights
        rows = len(self.weights)
        if self.groups == rows:
            return found.flatten(1)
        whole = rows // self.groups * self.groups
        kept = found[:, :whole].unflatten(1, (-1, self.groups)).sum(1)
        kept[:, : rows - whole] += found[:, whole:]
        return kept.flatten(1)

    def of_rows(self, picked: Tensor, gradients: Tensor) -> Tensor:
        """Of gradients [B, T, I] of the rows that the positions pick, [B, T]: [B, entries]."""
        weighted = gradients * self.weights[picked]
        kept = weighted.new_zeros(len(picked), self.groups, weighted.shape[2])
        places = (picked % self.groups)[:, :, None].expand_as(weighted)
        return kept.scatter_add_(1, places, weighted).flatten(1)


def sketches(
    shapes: Mapping[str, Sequence[int]], times: Mapping[str, Tensor], size: int, like: Tensor
) -> dict[str, Sketch]:
    """Of every parameter, with groups of about ``size`` rows.

    Args:
        shapes: of the parameters, by name.
        times: training time, of every entry or one number for all of them.
        size: rows that are added up.
        like: a gradient, whose type and device the weights have.
    """
    generator = torch.Generator().manual_seed(SKETCH_SEED)
    found = {}
    for name, shape in shapes.items():
        rows, width = _matrix(shape)
        weights = times[name].sqrt().to(like).expand(tuple(shape)).reshape(rows, width)
        groups = groups_of(shape, size)
        if groups < rows:
            signs = torch.randint(2, (rows, width), generator=generator, dtype=torch.int8)
            weights = weights * (2 * signs - 1).to(like)
        found[name] = Sketch(weights, groups)
    return found
