"""Random numbers that depend on seed and example only, not on the batch it comes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.dtypes import wide

BITS = 64  # of a word
WORD = 2**BITS  # values that it has
MANTISSA = 53  # bits of a double: what is kept of a word for a number between 0 and 1
# odd multipliers that keep the counters of streams, examples and places apart
STREAM, EXAMPLE, PLACE = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # of splitmix64


@dataclass(frozen=True)
class Draws:
    """Counter-based random numbers: a hash of seed, stream, example and place, without a state.

    Args:
        seed: of all of them.
        indices: positions of the examples in the data, [B].
        stream: another one gives other numbers for the same examples.

    Example:
        >>> both = Draws(0, torch.tensor([4, 7])).uniform(3)
        >>> torch.equal(both[1:], Draws(0, torch.tensor([7])).uniform(3))
        True
    """

    seed: int
    indices: Tensor
    stream: int = 0

    def uniform(self, count: int) -> Tensor:
        """Between 0 and 1, both excluded, [B, count] in double precision."""
        start = _signed(_mixed_whole(self.seed) + STREAM * self.stream)
        rows = self.indices.cpu().long()[:, None] * _signed(EXAMPLE)
        words = _mixed(_mixed(rows + start) + torch.arange(count) * _signed(PLACE))
        kept = _shifted(words, BITS - MANTISSA)
        return (kept.double() + 0.5) / 2**MANTISSA

    def signs(self, like: Tensor) -> Tensor:
        """+1 or -1 for every entry of a matrix [B, K]."""
        drawn = self.uniform(like.shape[1]) < 0.5
        return torch.where(drawn, 1.0, -1.0).to(like)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal, for every entry of a matrix [B, K]."""
        return torch.special.ndtri(self.uniform(like.shape[1])).to(like)

    def chosen(self, probability: Tensor) -> Tensor:
        """A column of each row of probabilities [B, K], [B, 1]."""
        return self.chosen_at(probability[:, None])[:, 0]

    def chosen_at(self, probability: Tensor) -> Tensor:
        """A column of each row of probabilities [B, T, K], [B, T, 1], drawn for every position."""
        reached = wide(probability).cumsum(2)  # in half precision small ones would be lost
        drawn = self.uniform(probability.shape[1])[:, :, None].to(reached) * reached[:, :, -1:]
        return torch.searchsorted(reached, drawn).clamp(max=probability.shape[2] - 1)


def _signed(word: int) -> int:
    """The 64 bits of a whole number as a signed one, which is what torch has."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (words >> bits) & ((1 << (BITS - bits)) - 1)


def _mixed(words: Tensor) -> Tensor:
    for bits, factor in MIXING:
        words = (words ^ _shifted(words, bits)) * _signed(factor)
    return words


def _mixed_whole(word: int) -> int:
    return int(_mixed(torch.tensor(_signed(word))))
