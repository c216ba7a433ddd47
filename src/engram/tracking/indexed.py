"""A dataset that says which example it gives: what streaming needs from a shuffling loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from engram.batches import Data
from engram.errors import DataError


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
        self.data: Any = data
        self.tensors = isinstance(data, Sequence) and all(isinstance(t, Tensor) for t in data)

    def __len__(self) -> int:
        if isinstance(self.data, Mapping):
            return len(next(iter(self.data.values())))
        return len(self.data[0]) if self.tensors else len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.tensors:
            return (index, *(t[index] for t in self.data))
        if isinstance(self.data, Mapping):
            return {"index": index} | {k: v[index] for k, v in self.data.items()}
        item = self.data[index]
        return {"index": index} | dict(item) if isinstance(item, Mapping) else (index, *item)
