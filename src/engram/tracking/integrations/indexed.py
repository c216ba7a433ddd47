"""A dataset that says which example it gives: what streaming needs from a shuffling loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from engram.core.data.batches import Batches, Data
from engram.core.data.inputs import mapped
from engram.core.errors import DataError


class Indexed(Dataset[Any]):
    """The examples of a data set with their index in front, (index, x, y).

    A dict gets the key ``index`` instead. Shuffle and batch it as you like.

    Example:
        >>> import torch
        >>> data = Indexed((torch.zeros(3, 2), torch.tensor([5, 6, 7])))
        >>> data[1]
        (1, tensor([0., 0.]), tensor(6))
    """

    def __init__(self, data: Data) -> None:
        if hasattr(data, "dataset"):
            raise DataError(
                "a dataset or a tuple of tensors",
                type(data).__name__,
                "wrap the loader's dataset, and make a new loader of it",
            )
        self.batches = Batches(data, 1)

    def __len__(self) -> int:
        return self.batches.num_data

    def __getitem__(self, index: int) -> Any:
        data = self.batches.data
        item = mapped(data, lambda t: t[index]) if self.batches.table else data[index]
        return {"index": index} | dict(item) if isinstance(item, Mapping) else (index, *item)
