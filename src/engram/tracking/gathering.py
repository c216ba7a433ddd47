"""One streamed epoch from those of several processes, each of which saw its share."""

from __future__ import annotations

from torch import nn

from engram.core.errors import ArgumentError
from engram.core.processes import Processes
from engram.tracking.epoch import COLUMNS, Epoch


def whole_epoch(epoch: Epoch, model: nn.Module, peers: Processes) -> Epoch:
    """What all processes have seen, the same on each: the latest visit of every example."""
    if peers.count == 1:
        return epoch
    peers.meet(model, len(epoch.status), buffers=False)
    every = {name: peers.gathered(getattr(epoch, name)) for name in COLUMNS}
    # the latest visit; of several in one step the most complete; then the lowest rank
    latest = (3 * every["visited"] + every["status"]).argmax(0, keepdim=True)
    chosen = {name: value.gather(0, latest)[0] for name, value in every.items()}
    return Epoch(**{**chosen, "visits": every["visits"].sum(0)})


def check_alone(peers: Processes) -> None:
    """A twin takes this process's gradients, and DDP's steps are means over all of them."""
    if peers.count > 1:
        raise ArgumentError(
            "follow in a training of one process",
            f"{peers.count} processes that train together",
            "leave follow out, or train on one",
        )
