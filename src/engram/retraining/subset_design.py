"""Which examples each of many trainings sees, so that every one is left out equally often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import MANY, fraction, shown, whole
from engram.core.identity.digests import of_tensors
from engram.errors import ArgumentError

LEAST = 2  # trainings with, and without, every example: fewer have no standard error
SEEDS = 2**31  # below it are the seeds of single trainings; every library's generator takes them


@dataclass(frozen=True, eq=False)
class Design:
    """The subsets of a run.

    Args:
        kept: which examples each training sees, [S, N].
        seeds: of each training.
        identity: what decides the subsets, but not how many there are: more can be added later.
    """

    kept: Tensor
    seeds: tuple[int, ...]
    identity: str

    def __len__(self) -> int:
        return len(self.kept)

    def left_out(self, number: int) -> Tensor:
        """Positions of the examples that a training does not see."""
        return (~self.kept[number]).nonzero()[:, 0]


def designed(subsets: Any, keep: Any, num_data: int, seed: int) -> Design:
    """A design for a number of subsets, or from the caller's own masks.

    Args:
        subsets: how many; or which examples each training keeps, bool [S, N].
        keep: share of the examples that each training sees; own masks say it themselves.
        num_data: N.
        seed: of all random numbers.
    """
    share = fraction("keep", keep, "use keep=0.85")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(subsets, Tensor):
        kept = _own_masks(subsets, num_data)
        drawn = torch.randint(SEEDS, (len(kept),), generator=generator)
        return Design(kept, tuple(drawn.tolist()), of_tensors({"kept": kept}))
    count = whole("number of subsets", subsets, 1, MANY, "use subsets=80")
    left_out = min(max(1, round(num_data * (1 - share))), num_data - 1)
    _check_enough(count, left_out, num_data)
    seeds, kept = _balanced(count, left_out, num_data, generator)
    return Design(kept, tuple(seeds), f"{left_out} of {num_data} at a time, seed {seed}")


def _balanced(
    count: int, left_out: int, num_data: int, generator: torch.Generator
) -> tuple[list[int], Tensor]:
    """Each training leaves out examples that were left out least so far, chance decides ties.

    So the numbers of times that two examples are left out differ by one at most, after every
    training, and a longer design begins with the shorter one.
    """
    times = torch.zeros(num_data, dtype=torch.float64)
    kept = torch.ones(count, num_data, dtype=torch.bool)
    seeds = []
    for number in range(count):
        seeds.append(int(torch.randint(SEEDS, (1,), generator=generator)))
        ties = torch.rand(num_data, generator=generator, dtype=torch.float64)
        chosen = (times + ties).argsort()[:left_out]
        kept[number, chosen] = False
        times[chosen] += 1
    return seeds, kept


def _check_enough(count: int, left_out: int, num_data: int) -> None:
    """Every example must be left out, and seen, by enough trainings."""
    needed = math.ceil(LEAST * num_data / min(left_out, num_data - left_out))
    if count < needed:
        raise ArgumentError(
            f"at least {needed} subsets, so that every example is left out, and seen, by "
            f"{LEAST} trainings",
            f"{count}, each without {left_out:,} of {num_data:,} examples",
            f"use subsets={needed} or more, or a keep nearer to 0.5",
        )


def _own_masks(kept: Tensor, num_data: int) -> Tensor:
    if kept.dtype != torch.bool or kept.dim() != 2 or kept.shape[1] != num_data or not len(kept):
        raise ArgumentError(
            f"subsets to be a number, or a bool tensor [S, {num_data}] of the examples that each "
            "training keeps",
            f"a tensor {list(kept.shape)} of {shown(kept.dtype)}",
            "use subsets=80",
        )
    empty = (~kept.any(1)).nonzero()[:, 0]
    if len(empty):
        raise ArgumentError(
            "subsets with some examples to train on",
            f"none in row {int(empty[0])}",
            "leave that row out",
        )
    return kept.cpu().clone()
