"""Processes that train one model together, each on its share of the data, as DDP does."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engram.errors import ArgumentError, EngineError, ModelMismatchError
from engram.precision import wide
from engram.tracking.epoch import COLUMNS, Epoch

PATIENCE = timedelta(minutes=5)
SAME = 1e-3  # relative difference of weights that the ranks' own rounding may bring about


@dataclass(frozen=True)
class Peers:
    """Which process this is, and of how many; alone without ``torch.distributed``."""

    rank: int = 0
    count: int = 1

    @classmethod
    def found(cls, together: bool) -> Peers:
        """The processes of the default group, where they train together."""
        if together and dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def whole(self, epoch: Epoch, model: nn.Module) -> Epoch:
        """What all processes have seen, the same on each: the latest visit of every example."""
        if self.count == 1:
            return epoch
        self._meet()
        self._check_same(model, len(epoch.status))
        every = {name: _gathered(getattr(epoch, name), self.count) for name in COLUMNS}
        # the latest visit; of several in one step the most complete; then the lowest rank
        latest = (3 * every["visited"] + every["status"]).argmax(0, keepdim=True)
        chosen = {name: value.gather(0, latest)[0] for name, value in every.items()}
        return Epoch(**{**chosen, "visits": every["visits"].sum(0)})

    def _meet(self) -> None:
        """Wait for the others, and not for ever."""
        if dist.get_backend() != "gloo":
            return
        try:
            dist.monitored_barrier(timeout=PATIENCE)
        except RuntimeError as error:
            raise EngineError(
                f"all {self.count} processes to end their epoch together",
                f"not all within {PATIENCE.seconds // 60} minutes ({error})",
                "call tracker.finish_epoch() on every rank; where each process trains a model of "
                "its own, use Tracker(..., across_ranks=False)",
            ) from error

    def _check_same(self, model: nn.Module, num_data: int) -> None:
        sums = [float(wide(p.detach()).square().sum()) for p in model.parameters()]
        own = torch.tensor([float(num_data), *sums[:1], sum(sums)], dtype=torch.float64)
        every = _gathered(own, self.count)
        if not torch.allclose(every, own.expand_as(every), rtol=SAME, equal_nan=True):
            raise ModelMismatchError(
                "processes that train one model on one data set",
                f"examples and squared norms of weights {every.tolist()} on the ranks",
                "where each process trains a model of its own, use Tracker(..., "
                "across_ranks=False)",
            )


def check_alone(peers: Peers) -> None:
    """A twin takes this process's gradients, and DDP's steps are means over all of them."""
    if peers.count > 1:
        raise ArgumentError(
            "follow in a training of one process",
            f"{peers.count} processes that train together",
            "leave follow out, or train on one",
        )


def _gathered(value: Tensor, count: int) -> Tensor:
    """The tensors of all ranks, [ranks, ...], on the CPU."""
    place = torch.device("cpu")
    if dist.get_backend() == "nccl":
        place = torch.device("cuda", torch.cuda.current_device())
    own = value.to(place).contiguous()
    every = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(every, own)
    return torch.stack(every).cpu()
