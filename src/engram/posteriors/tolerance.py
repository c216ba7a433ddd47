"""How far a fit may be from the exact one for speed, and what is made of that."""

from __future__ import annotations

import torch
from torch import nn

from engram.core.arguments import is_auto, is_number, shown
from engram.core.parameters import trainable
from engram.errors import ArgumentError
from engram.linalg.block import Block

# Relative errors that are allowed in single precision. At 0.03 scores change by 0.2 to 2.2 %, less
# than Kronecker factors are off by themselves, and a pass costs less than one with a diagonal
# (docs/decisions.md, docs/results/tolerance.md).
TOLERANCE = 0.03  # of how far an average example moves the model
SAMPLED_SHARE = 3.0  # tolerances of the outputs' variance that may be sampled: it has no bias


def chosen_tolerance(given: float | str, model: nn.Module) -> float:
    """The one given; ``"auto"`` is 0 in double precision, since who uses that wants equality.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> chosen_tolerance("auto", model), chosen_tolerance("auto", model.double())
        (0.03, 0.0)
    """
    if is_auto(given):
        double = any(p.dtype == torch.float64 for p in trainable(model).values())
        return 0.0 if double else TOLERANCE
    if isinstance(given, str) or not (is_number(given) and 0 <= given < 1):
        raise ArgumentError(
            'a tolerance from 0 to below 1, or "auto"',
            shown(given),
            "use 0 to have everything exact",
        )
    return float(given)


def sampled_share(tolerance: float) -> float:
    """Of the outputs' variance, how much may be sampled in an exact curvature."""
    return SAMPLED_SHARE * tolerance


def within(blocks: tuple[Block, ...], prior: float, tolerance: float) -> tuple[Block, ...]:
    """The blocks with eigenvalues merged that act alike, and diagonal ones factorised."""
    if tolerance == 0:
        return blocks
    return tuple(block.within(prior, tolerance) for block in blocks)
