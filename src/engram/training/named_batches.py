"""Which examples a forward pass sees, from the loader that the loop already has.

The loader's sampler is listened to for the indices of every batch, and the loader itself for when
that batch is handed out: with workers, samplers run ahead. The first forward pass in training mode
after a batch was handed out is that batch's; later ones, as of a closure that is called again, see
it a second time and are no visits. A loop that fetches one batch ahead is recognised by its first
two batches, which come before the first forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from engram.core.data.batches import logits_of
from engram.core.data.inputs import length_of
from engram.errors import ArgumentError
from engram.training.visits import Visits

AHEAD = 2  # batches before the first forward pass of a loop that fetches one ahead


class Stream:
    """The batches of one iteration over a loader.

    Attributes:
        drawn: by the sampler, and not handed out yet.
        waiting: handed out, and not passed through the model yet.
        limit: how many may wait, None before the first forward pass.
    """

    def __init__(self) -> None:
        self.drawn: deque[Tensor] = deque()
        self.waiting: deque[Tensor] = deque()
        self.limit: int | None = None

    def hand_out(self) -> None:
        """The next batch goes to the loop; one that was left there unused is forgotten."""
        self.waiting.append(self.drawn.popleft())
        if self.limit is not None and len(self.waiting) > self.limit:
            self.waiting.popleft()

    def take(self) -> Tensor | None:
        """The batch of a forward pass; None where it had one before."""
        if self.limit is None:
            self.limit = AHEAD if len(self.waiting) == AHEAD else 1
            while len(self.waiting) > self.limit:  # a loop that went over some to where it was
                self.waiting.popleft()
        return self.waiting.popleft() if self.waiting else None


class Sampler:
    """The sampler of a loader, which tells the indices that it gives."""

    def __init__(self, inner: Any, begin: Callable[[], Stream]) -> None:
        self.inner, self.begin = inner, begin

    def __iter__(self) -> Iterator[Any]:
        return self._told(iter(self.inner), self.begin())

    @staticmethod
    def _told(source: Iterator[Any], stream: Stream) -> Iterator[Any]:
        for batch in source:
            several = isinstance(batch, list | tuple | Tensor)
            given = list(batch) if several and not isinstance(batch, Tensor) else batch
            stream.drawn.append(torch.as_tensor(given).reshape(-1))
            yield batch

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)


class NamedBatches:
    """Listens to a loader and a model until it is removed.

    Args:
        loader: of the training.
        model: whose forward passes they are.
        seen: is told the indices and outputs of every visit.
        note: is told the indices right before the model runs on them.
    """

    is_copy = False  # a copy of the model has copies of its hooks, and is not what is recorded

    def __init__(
        self,
        loader: DataLoader[Any],
        model: nn.Module,
        seen: Visits,
        note: Callable[[Tensor], None],
    ) -> None:
        loader = innermost(loader)
        _check_loader(loader)
        self.loader, self.seen, self.note = loader, seen, note
        seen.sums.num_data = length_of(loader.dataset)
        self.begun: Stream | None = None
        self.stream: Stream | None = None
        self._place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler, self._class = getattr(loader, self._place), type(loader)
        # a loader refuses new samplers, and iter() asks the class: both are put past it
        object.__setattr__(loader, self._place, Sampler(self._sampler, self._begin))
        loader.__class__ = _told_class(self._class, self)
        loader._iterator = None  # persistent workers go on with the sampler that they know
        self._batch: Tensor | None = None
        before = model.register_forward_pre_hook(self._comes)
        self._handles = before, model.register_forward_hook(self._passed)

    def __deepcopy__(self, memo: dict[int, Any]) -> NamedBatches:
        silent = object.__new__(NamedBatches)
        silent.is_copy = True
        return silent

    def remove(self) -> None:
        """Leave loader and model as they were."""
        for handle in self._handles:
            handle.remove()
        object.__setattr__(self.loader, self._place, self._sampler)
        self.loader.__class__ = self._class
        self.loader._iterator = None

    def _begin(self) -> Stream:
        self.begun = Stream()
        return self.begun

    def handed(self, source: Iterator[Any]) -> Iterator[Any]:
        """The batches of an iteration; each is noted when it is handed out."""
        stream = None
        for batch in source:
            stream = self.begun if stream is None else stream
            if stream is not None and stream.drawn:
                stream.hand_out()
                self.stream = stream
            yield batch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _comes(self, model: nn.Module, args: Any) -> None:
        if self.is_copy or not (model.training and torch.is_grad_enabled()):
            return
        self._batch = None if self.stream is None else self.stream.take()
        if self._batch is not None:
            self.note(self._batch)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _passed(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.is_copy or not (model.training and torch.is_grad_enabled()):
            return
        batch, self._batch = self._batch, None
        if batch is None and self.stream is not None:
            return  # the same examples once more, as in a closure
        outputs = logits_of(output)
        fits = isinstance(outputs, Tensor) and outputs.dim() in (1, 2)
        if batch is None or not fits or len(outputs) != len(batch):
            self.seen.num_unmatched += 1
            return
        self.seen.add(batch, outputs)


def innermost(loader: Any) -> Any:
    """The loader whose sampler is asked: accelerate hands out the batches of one that it holds."""
    while isinstance(inner := getattr(loader, "base_dataloader", None), DataLoader):
        loader = inner
    return loader


def _told_class(base: type[DataLoader[Any]], watch: NamedBatches) -> type[DataLoader[Any]]:
    """A loader's class whose iterations tell what they hand out."""

    def begin(loader: Any) -> Iterator[Any]:
        return watch.handed(base.__iter__(loader))

    return type(base.__name__, (base,), {"__iter__": begin, "__module__": base.__module__})


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ArgumentError(
            "the DataLoader of the training",
            type(loader).__name__,
            "pass the loader that the loop goes over, or name examples by training.visit",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            "a loader over a dataset with positions",
            f"one over {type(loader.dataset).__name__}, an IterableDataset",
            "name the examples of every step by training.visit(indices, outputs)",
        )
    if not getattr(loader, "in_order", True):
        raise ArgumentError(
            "a loader that keeps the order of its sampler",
            "one with in_order=False",
            "make it with in_order=True, or name examples by training.visit",
        )
    if isinstance(loader.batch_sampler or loader.sampler, Sampler):
        raise ArgumentError(
            "a loader that no other record listens to",
            "one that does",
            "end the other record before with its stop()",
        )
