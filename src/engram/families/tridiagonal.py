r"""A Gaussian over a chain, whose precision couples neighbours only.

Every second block is eliminated at once, which leaves a chain of half the length, and so on: the
blocks of the inverse that a smoother needs come from log2(T) batched steps instead of T single
ones. Derivatives pass through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.families.base import improper


@dataclass(frozen=True, eq=False)
class ChainSolution:
    """What the chain's precision S and its linear term b give.

    Attributes:
        mean: S^-1 b, [T, D].
        covariance: diagonal blocks of S^-1, [T, D, D].
        cross: blocks (t, t + 1) of S^-1, [T - 1, D, D].
        log_determinant: log |S|.
    """

    mean: Tensor
    covariance: Tensor
    cross: Tensor
    log_determinant: Tensor


def solve_chain(diagonal: Tensor, upper: Tensor, linear: Tensor) -> ChainSolution:
    """Solve with S by odd-even elimination; PosteriorError unless S is positive definite.

    Args:
        diagonal: blocks (t, t) of S, [T, D, D].
        upper: blocks (t, t + 1) of S, [T - 1, D, D].
        linear: b, [T, D].
    """
    if len(diagonal) == 0:
        return ChainSolution(linear, diagonal, upper, linear.sum())
    factor, info = torch.linalg.cholesky_ex(diagonal[0::2])
    if (info != 0).any():
        raise improper("a positive definite precision of the states", "one that is not")
    own = torch.cholesky_inverse(factor)
    own_mean = _times(own, linear[0::2])
    determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum()
    # of an even block: to its right neighbour, and to its left one; absent ones are missing rows
    right = own[: len(upper[0::2])] @ upper[0::2]
    left = own[1:] @ upper[1::2].mT
    kept = len(diagonal[1::2])
    reduced = diagonal[1::2] - upper[0::2].mT @ right
    reduced = reduced - _pad(upper[1::2] @ left, kept)
    term = linear[1::2] - _times(upper[0::2].mT, own_mean[:kept])
    term = term - _pad(_times(upper[1::2], own_mean[1:]), kept)
    couplings = -upper[1::2][: max(kept - 1, 0)] @ right[1:]
    inner = solve_chain(reduced, couplings, term)
    return _expand(inner, own, own_mean, left, right, determinant)


def _expand(
    inner: ChainSolution,
    own: Tensor,
    own_mean: Tensor,
    left: Tensor,
    right: Tensor,
    determinant: Tensor,
) -> ChainSolution:
    """From the odd blocks back to all: an even block depends on its two neighbours."""
    total, size = len(own), own.shape[-1]
    gain_right, gain_left = _pad(right, total), _pad_front(left, total)
    mean_right, mean_left = _pad(inner.mean, total), _pad_front(inner.mean, total)[:total]
    around_right, around_left = _pad(inner.covariance, total), _pad_front(inner.covariance, total)
    between = _pad_front(_pad(inner.cross, total - 1), total)  # (left, right) of each even block
    to_right = -gain_left @ between - gain_right @ around_right
    to_left = -gain_left @ around_left - gain_right @ between.mT
    even_mean = own_mean - _times(gain_left, mean_left) - _times(gain_right, mean_right)
    even = own - to_left @ gain_left.mT - to_right @ gain_right.mT
    cross = _interleave(to_right[: len(right)], to_left[1:].mT)
    return ChainSolution(
        _interleave(even_mean, inner.mean),
        _interleave(0.5 * (even + even.mT), inner.covariance),
        cross.reshape(-1, size, size),
        determinant + inner.log_determinant,
    )


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None])[..., 0]


def _pad(blocks: Tensor, length: int) -> Tensor:
    return torch.cat([blocks, blocks.new_zeros(max(length - len(blocks), 0), *blocks.shape[1:])])[
        :length
    ]


def _pad_front(blocks: Tensor, length: int) -> Tensor:
    return torch.cat([blocks.new_zeros(1, *blocks.shape[1:]), blocks])[:length]


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    """first[0], second[0], first[1], ...; first has as many rows as second, or one more."""
    paired = torch.stack([first[: len(second)], second], 1).flatten(0, 1)
    return torch.cat([paired, first[len(second) :]])
