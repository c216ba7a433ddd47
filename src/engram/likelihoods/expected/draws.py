"""Standard normal draws that cover the space evenly: the same ones for a seed, every time."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral

import torch
from torch import Tensor

from engram.core.errors import LikelihoodError

FEWEST = 16
AT_ONCE = 2**18  # numbers in a block of draws for all examples


def check_samples(num_samples: int) -> int:
    """At least as many as an average over pairs needs to mean anything."""
    if not (isinstance(num_samples, Integral) and num_samples >= FEWEST):
        raise LikelihoodError(f"at least {FEWEST} samples", repr(num_samples), "use 256 or more")
    return int(num_samples)


def normal_draws(num_samples: int, dimension: int, seed: int, like: Tensor) -> Tensor:
    """Half of the draws, [num_samples / 2, dimension]; the other half is minus these.

    A scrambled Sobol sequence through the normal quantile. The sequence has a generator of its
    own, so that the caller's random state does not move.
    """
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed)
    uniform = engine.draw(num_samples // 2, dtype=torch.float64)
    margin = torch.finfo(torch.float64).eps
    return torch.special.ndtri(uniform.clamp(margin, 1 - margin)).to(like)


def steps(variance: Tensor, num_samples: int, seed: int) -> Iterator[Tensor]:
    """The draws scaled to the outputs of every example, in blocks [C, N, K]."""
    draws = normal_draws(num_samples, variance.shape[1], seed, variance)
    scale = variance.sqrt()
    for block in draws.split(max(1, AT_ONCE // max(1, variance.numel()))):
        yield scale * block[:, None, :]
