"""Some of the examples as data of their own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.utils.data import DataLoader, Subset

from engram.core.data.inputs import Data, is_table, mapped, plain


def part_of(data: Data, indices: Tensor) -> Data:
    """The examples with these indices, in this order, in the form that all of them have.

    Args:
        data: in any form that :class:`engram.core.data.batches.Batches` reads.
        indices: of some of its examples.

    Example:
        >>> import torch
        >>> part_of((torch.zeros(5, 3), torch.arange(5)), torch.tensor([1, 4]))[1]
        tensor([1, 4])
    """
    if isinstance(data, DataLoader):
        some = Subset(data.dataset, indices.tolist())
        return DataLoader(some, data.batch_size or 1, collate_fn=data.collate_fn)
    table = plain(data) if isinstance(data, Mapping) else data
    if is_table(table):
        return mapped(table, lambda tensor: tensor[indices])
    return Subset(data, indices.tolist())
