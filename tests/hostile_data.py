"""Data sets, samplers and collate functions that are not what they say."""

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)


class Backwards(SequentialSampler):
    """In order by its type, from the last to the first in truth."""

    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))


class Fewer(SequentialSampler):
    """All examples by its length, all but two in truth."""

    def __iter__(self):
        return iter(range(len(self.data_source) - 2))


class More(SequentialSampler):
    """It begins again."""

    def __iter__(self):
        yield from range(len(self.data_source))
        yield 0


class SwappedBatches(BatchSampler):
    """The first two batches in each other's place."""

    def __iter__(self):
        first, second, *rest = super().__iter__()
        return iter([second, first, *rest])


def backwards(items):
    return default_collate(items[::-1])


def shuffled(items):
    return default_collate([items[i] for i in torch.randperm(len(items))])


def without_the_broken(items):
    return default_collate([item for item in items if item is not None])


def doubled(items):
    return default_collate([*items, items[0]])


def averaged(items):
    x, y = default_collate(items)
    return x - x.mean(0), y


class SomeBroken(Dataset):
    """None where an example cannot be read."""

    def __init__(self, data, broken):
        self.data, self.broken = TensorDataset(*data), broken

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return None if index == self.broken else self.data[index]


class Boasting(TensorDataset):
    """Longer by its length than it is."""

    def __len__(self):
        return super().__len__() + 2

    def __getitem__(self, index):
        if index >= super().__len__():
            raise IndexError(f"no example {index}")
        return super().__getitem__(index)


class Augmented(TensorDataset):
    """Noise drawn anew at every reading."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


class Drifting(TensorDataset):
    """Another data set once it has been gone through: two readings in a row are the same."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        x, y = super().__getitem__(index)
        return x + (self.reads // 60), y


class Pairs(Dataset):
    """Examples as (inputs, y) with inputs made by a function of a row."""

    def __init__(self, data, inputs):
        self.data, self.inputs = data, inputs

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return self.inputs(self.data[0][index]), self.data[1][index]


def loader(data, **settings):
    dataset = data if isinstance(data, Dataset) else TensorDataset(*data)
    sampler = settings.pop("sampler", None)
    batch_sampler = settings.pop("batch_sampler", None)
    if batch_sampler is not None:
        return DataLoader(
            dataset, batch_sampler=batch_sampler(SequentialSampler(dataset), 2, False)
        )
    made = None if sampler is None else sampler(dataset)
    return DataLoader(dataset, **{"batch_size": 2, "sampler": made, **settings})


class OwnOrder(Sampler):
    """In order, but of no type that says so."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(range(len(self.dataset)))

    def __len__(self):
        return len(self.dataset)
