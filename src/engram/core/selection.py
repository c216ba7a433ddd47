"""Indices of examples: checks of those that a caller names, and evenly spread samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram.core.arguments import shown
from engram.errors import ArgumentError


def spread(count: int, most: int) -> Tensor:
    """At most ``most`` positions spread evenly over ``count``, both ends among them.

    Example:
        >>> spread(9, 3), spread(2, 3)
        (tensor([0, 4, 8]), tensor([0, 1]))
    """
    return torch.linspace(0, count - 1, min(count, most)).long().unique()


def check_group(
    indices: Sequence[int] | Tensor | None,
    weights: Sequence[float] | Tensor | None,
    num_data: int,
) -> tuple[Tensor, Tensor]:
    """The chosen indices and their weights; all examples if no indices, weight 1 if no weights."""
    chosen = check_indices(indices, num_data)
    if weights is None:
        return chosen, torch.ones(len(chosen), dtype=torch.float64)
    try:
        found = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            "a list of weights", shown(weights), "give one number per index"
        ) from error
    if found.shape != chosen.shape:
        raise ArgumentError(
            f"{len(chosen)} finite weights, one per index",
            f"shape {tuple(found.shape)}",
            "give one weight per index",
        )
    if not torch.isfinite(found).all():
        where = int((~torch.isfinite(found)).nonzero()[0])
        raise ArgumentError(
            f"{len(chosen)} finite weights, one per index",
            f"{float(found[where])} for index {int(chosen[where])}",
            "give a number; 1 takes the example out",
        )
    return chosen, found


def check_indices(
    indices: Sequence[int] | Tensor | None,
    num_data: int,
    once: str = "name each example once; weights, where there are any, take out more or less of it",
) -> Tensor:
    """Positions of examples, each once, on the CPU; all of them if none are named.

    Args:
        indices: that a user gave.
        num_data: N, how many examples there are.
        once: what to do about an index that comes twice.
    """
    try:
        chosen = torch.arange(num_data) if indices is None else torch.as_tensor(indices).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            "a list of integer indices", shown(indices), "pass a list or a tensor"
        ) from error
    if chosen.dtype == torch.bool:
        raise ArgumentError("indices as integers", "a mask", "pass mask.nonzero()[:, 0]")
    if chosen.numel() == 0:
        raise ArgumentError("at least one index", "none", "name some examples")
    if chosen.dim() != 1 or chosen.is_floating_point() or chosen.is_complex():
        raise ArgumentError(
            "a list of integer indices",
            f"{chosen.dtype} of shape {tuple(chosen.shape)}",
            "pass whole numbers in one list, such as [0, 5, 7]",
        )
    chosen = chosen.long()  # torch compares no large unsigned numbers
    outside = (chosen < 0) | (chosen >= num_data)
    if outside.any():
        raise ArgumentError(
            f"indices from 0 to {num_data - 1}",
            f"{int(chosen[outside][0])}, out of range",
            "count examples from 0 in the order of the data",
        )
    if len(chosen.unique()) != len(chosen):
        values, counts = chosen.unique(return_counts=True)
        raise ArgumentError(
            "each index once",
            f"{int(values[counts > 1][0])} repeated",
            once,
        )
    return chosen
