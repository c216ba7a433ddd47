"""What the processes of a group have, added up or put together: sums, columns, decisions.

Everything goes in two steps. First each says what it has, by names and shapes, so that a process
with no examples, or one whose examples never reached some layer, takes part all the same, and
processes that are at different places of their programs are told so instead of waiting for ever.
Then the tensors themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engram.core.processes.presence import Presence
from engram.errors import EngineError, ModelMismatchError

BUCKET = 2**23  # entries that are added up in one operation: fewer calls against memory
Described = dict[str, tuple[list[int], str]]  # shape and type of each tensor


@dataclass(frozen=True)
class Processes:
    """Which process this is, and of how many; alone without ``torch.distributed``.

    Example:
        >>> Processes.found(together=True)
        Processes(rank=0, count=1)
        >>> Processes(rank=1, count=3).rows(8).tolist()
        [3, 4, 5]
        >>> Processes(rank=2, count=3).rows(2).tolist()
        []
    """

    rank: int = 0
    count: int = 1
    presence: Presence | None = field(default=None, repr=False, compare=False)  # in a call

    @classmethod
    def found(cls, together: bool) -> Processes:
        """The processes of the default group, where they work together."""
        if not (together and dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self.count == 1

    def rows(self, number: int) -> Tensor:
        """Which of so many are this process's share of the work, in order; perhaps none."""
        return torch.arange(number).tensor_split(self.count)[self.rank]

    def told(self, kind: str, value: Any) -> list[Any]:
        """What each process says, by rank; anything that JSON can hold."""
        if self.presence is None:
            return [value]
        self.presence.arrive()
        text = torch.tensor(list(json.dumps([kind, value]).encode()), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([len(text)])).flatten().tolist()
        rows = self._gathered(torch.nn.functional.pad(text, (0, max(sizes) - len(text))))
        found = [
            json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)
        ]
        for rank, (other, _) in enumerate(found):
            if other != kind:
                raise EngineError(
                    "all processes to make the same calls in the same order",
                    f"{kind!r} in process {self.rank}, {other!r} in process {rank}",
                    "call engram with the same arguments on every rank",
                )
        return [said for _, said in found]

    def agreed(self, kind: str, value: Any) -> Any:
        """What the first process says, which free memory, say, may let others say otherwise."""
        return self.told(kind, value)[0]

    def joined(
        self,
        what: str,
        columns: Mapping[str, Tensor],
        padding: Mapping[str, float] | None = None,
    ) -> dict[str, Tensor]:
        """The rows of all processes one after the other, on every process.

        Args:
            what: these are, in words; all must ask for the same.
            columns: of this process, on the CPU, perhaps without rows.
            padding: columns [n, T] whose rows may differ in width, and what they are filled with.
        """
        if self.alone:
            return dict(columns)
        every = self.told(what, [len(next(iter(columns.values()), ())), _described(columns)])
        sizes = [int(size) for size, _ in every]
        whole = _widest([said for _, said in every])
        joined: dict[str, Tensor] = {}
        for name, (shape, kind) in whole.items():
            dtype = getattr(torch, kind)
            plain = torch.uint8 if dtype is torch.bool else dtype
            filled = (padding or {}).get(name, 0)
            own = torch.full((max(sizes), *shape[1:]), filled, dtype=dtype).to(plain)
            if len(columns.get(name, ())):
                given = columns[name]
                own[tuple(slice(size) for size in given.shape)] = given.to(plain)
            rows = self._gathered(own).to(dtype)
            joined[name] = torch.cat([part[:n] for part, n in zip(rows, sizes, strict=True)])
        return joined

    def summed(
        self, what: str, named: Mapping[str, Tensor], device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """The sums over all processes, by name; what a process does not have counts as zero.

        Args:
            what: these are, in words; all must ask for the same.
            named: of this process.
            device: of the sums of what it does not have; the CPU if not given.
        """
        if self.alone:
            return dict(named)
        whole = _same(self.told(what, _described(named)))
        found: dict[str, Tensor] = {}
        for names in _buckets(whole):
            kind = getattr(torch, whole[names[0]][1])
            parts = [
                named[name].reshape(-1).to(_place())
                if name in named
                else torch.zeros(_entries(whole[name]), dtype=kind, device=_place())
                for name in names
            ]
            flat = torch.cat(parts)
            self._carried_out(partial(dist.all_reduce, flat))
            pieces = flat.split([_entries(whole[name]) for name in names])
            for name, piece in zip(names, pieces, strict=True):
                there = named[name].device if name in named else (device or torch.device("cpu"))
                found[name] = piece.reshape(whole[name][0]).to(there)
        return {name: found[name] for name in whole}

    def spread(
        self, what: str, named: Mapping[str, Tensor], device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Tensors that one process each has, on all of them."""
        if self.alone:
            return dict(named)
        every = self.told(what, _described(named))
        found: dict[str, Tensor] = {}
        for owner, said in enumerate(every):
            for name, (shape, kind) in said.items():
                if owner == self.rank:
                    value = named[name].to(_place()).contiguous()
                else:
                    value = torch.empty(shape, dtype=getattr(torch, kind), device=_place())
                self._carried_out(partial(dist.broadcast, value, owner))
                found[name] = value.to(device or torch.device("cpu"))
        return found

    def shares(self, costs: Sequence[float]) -> list[int]:
        """Who does what of some pieces of work, the largest given out first."""
        load, owners = [0.0] * self.count, [0] * len(costs)
        for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
            owner = load.index(min(load))
            owners[number], load[owner] = owner, load[owner] + costs[number]
        return owners

    def _gathered(self, value: Tensor) -> Tensor:
        """The tensors of all processes, of one shape, [ranks, ...], on the CPU."""
        own = value.to(_place()).contiguous()
        every = [torch.empty_like(own) for _ in range(self.count)]
        self._carried_out(partial(dist.all_gather, every, own))
        return torch.stack(every).cpu()

    def _carried_out(self, operation: Callable[[], Any]) -> None:
        """A collective operation; its failure says who has stopped."""
        assert self.presence is not None
        try:
            operation()
        except RuntimeError as error:
            raise self.presence.blame(error) from error


def _described(named: Mapping[str, Tensor]) -> Described:
    return {n: (list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in named.items()}


def _entries(described: tuple[list[int], str]) -> int:
    count = 1
    for size in described[0]:
        count *= size
    return count


def _same(every: Sequence[Described]) -> Described:
    """What any of them has; ModelMismatchError where it has another form on some."""
    whole: Described = {}
    for rank, said in enumerate(every):
        for name, described in said.items():
            if whole.setdefault(name, described) != described:
                raise ModelMismatchError(
                    "processes that share one model and its data",
                    f"{name!r} of another shape or type on process {rank}",
                    "load the same model on every rank",
                )
    return whole


def _widest(every: Sequence[Described]) -> Described:
    """The form that holds everybody's columns; who has no rows does not know it."""
    whole: Described = {}
    for said in every:
        for name, (shape, kind) in said.items():
            known = whole.get(name, (shape, kind))[0]
            whole[name] = ([max(a, b) for a, b in zip(known, shape, strict=True)], kind)
    return whole


def _buckets(whole: Described) -> list[list[str]]:
    """Names whose tensors are of one type and go into one operation."""
    found: list[list[str]] = []
    kind, room = "", 0
    for name in sorted(whole, key=lambda n: (whole[n][1], n)):
        size = _entries(whole[name])
        if not found or whole[name][1] != kind or size > room:
            found.append([])
            kind, room = whole[name][1], BUCKET
        found[-1].append(name)
        room -= size
    return found


def _place() -> torch.device:
    """The device that the backend communicates from."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
