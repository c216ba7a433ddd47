"""Processes that train one model together, as those of DDP do: ranks, barriers and collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engram.core.dtypes import wide
from engram.errors import DataError, EngineError, ModelMismatchError

PATIENCE = timedelta(minutes=5)  # waited for the other processes; one may have more to load
SAME_NORM = 1e-6  # relative difference of squared norms of weights that is taken for rounding


@dataclass(frozen=True)
class Processes:
    """Which process this is, and of how many; alone without ``torch.distributed``.

    Example:
        >>> Processes.found(together=True)
        Processes(rank=0, count=1)
        >>> Processes(rank=1, count=3).rows(8).tolist()
        [3, 4, 5]
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def found(cls, together: bool) -> Processes:
        """The processes of the default group, where they work together."""
        if together and dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def meet(self, model: nn.Module, num_data: int, buffers: bool) -> None:
        """Wait for the others, and not for ever; all must have the same model and data.

        Args:
            model: of this process.
            num_data: examples of its data.
            buffers: whether running statistics have to be the same as well.
        """
        if self.count == 1:
            return
        if dist.get_backend() == "gloo":
            self._wait()
        held = [*model.parameters(), *(model.buffers() if buffers else ())]
        floats = [wide(t.detach()) for t in held if t.is_floating_point()]
        sums = [float(t.square().sum()) for t in floats]
        own = torch.tensor([float(num_data), *sums], dtype=torch.float64)
        sizes = self.gathered(torch.tensor([len(own)])).flatten()
        every = self.gathered(own) if len(sizes.unique()) == 1 else None
        if every is None or not torch.allclose(every, own, rtol=SAME_NORM, equal_nan=True):
            raise ModelMismatchError(
                "processes that share one model and its data",
                "other weights, running statistics or numbers of examples on some",
                "broadcast buffers from the first rank before; where each process has a model of "
                "its own, use across_ranks=False",
            )

    def _wait(self) -> None:
        try:
            dist.monitored_barrier(timeout=PATIENCE)
        except RuntimeError as error:
            raise EngineError(
                f"all {self.count} processes to make this call together",
                f"not all within {PATIENCE.seconds // 60} minutes ({error})",
                "call it on every rank; where each process has a model of its own, use "
                "across_ranks=False",
            ) from error

    def gathered(self, value: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape, [ranks, ...], on the CPU."""
        own = value.to(_place()).contiguous()
        every = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(every, own)
        return torch.stack(every).cpu()

    def rows(self, num_data: int) -> Tensor:
        """The examples that are this process's share of the work, in order."""
        if num_data < self.count:
            raise DataError(
                f"at least one example for each of {self.count} processes",
                f"{num_data}",
                "make the call on one process, with across_ranks=False",
            )
        return torch.arange(num_data).tensor_split(self.count)[self.rank]

    def joined(self, columns: Mapping[str, Tensor], num_data: int) -> dict[str, Tensor]:
        """The shares' rows one after the other: those of all examples, on every process."""
        if self.count == 1:
            return dict(columns)
        sizes = [len(part) for part in torch.arange(num_data).tensor_split(self.count)]
        found = {}
        for name, own in columns.items():
            padded = own.new_zeros(max(sizes), *own.shape[1:])
            padded[: len(own)] = own
            plain = padded.to(torch.uint8) if own.dtype == torch.bool else padded
            every = self.gathered(plain).to(own.dtype)
            found[name] = torch.cat([part[:n] for part, n in zip(every, sizes, strict=True)])
        return found

    def summed(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all processes, by name; every process must have the same names."""
        if self.count == 1:
            return dict(named)
        names = sorted(named)
        shape = torch.tensor([len(names), *(named[n].numel() for n in names)]).sum()[None]
        if len(self.gathered(shape).unique()) > 1:
            raise EngineError(
                "a model that uses the same layers on every process's share",
                "other parameters with gradients on some",
                "make the call on one process, with across_ranks=False",
            )
        found = {}
        for name in names:
            value = named[name].to(_place()).clone()
            dist.all_reduce(value)
            found[name] = value.to(named[name].device)
        return found


def _place() -> torch.device:
    """The device that the backend communicates from."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
