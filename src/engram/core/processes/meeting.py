"""How processes begin a call together: all there, with the same call, model and data.

What they do not share (weights that drifted apart, running statistics of their own, another file of
data) would make sums of different things, so it is compared before anything is computed, and the
error says what differs, and on which process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engram._version import __version__
from engram.core.arguments import truth
from engram.core.data.batches import Batches, Data
from engram.core.data.inputs import tensors_of
from engram.core.dtypes import wide
from engram.core.parameters import uncompiled
from engram.core.processes.group import Processes
from engram.core.processes.presence import Presence
from engram.core.selection import spread
from engram.core.state.sharded import whole_weights
from engram.errors import ModelMismatchError

SAME_NUMBER = 1e-6  # relative difference of norms and sums that is taken for rounding
COMPARED = 32  # examples, spread over the data, that are read by every process
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, by which others cannot know it
NAMED = 3  # things that differ, of which the error gives the names
REMEDIES = {
    "call": "call it with the same arguments on every rank",
    "weights": "load the same weights on every rank",
    "statistics": "broadcast buffers from the first rank before",
    "examples": "give every rank the whole data in the same order: it is divided here",
}


@contextmanager
def together(
    across_ranks: bool,
    model: nn.Module,
    data: Data | None,
    call: str,
    settings: Mapping[str, Any] | None = None,
    buffers: bool = True,
) -> Iterator[Processes]:
    """The processes that make a call together, after they have compared what they have.

    A model that FSDP2 has sharded over them has whole weights while this lasts.

    Args:
        across_ranks: whether they do; else this one is by itself.
        model: of this process.
        data: all of it; None where it is not compared.
        call: its name.
        settings: of the call, which must be the same on all.
        buffers: whether running statistics have to be the same as well.
    """
    peers = Processes.found(truth("across_ranks", across_ranks))
    if peers.alone:
        with whole_weights(model) if across_ranks else nullcontext():
            yield peers
        return
    presence = Presence(peers.rank, peers.count)
    peers = replace(peers, presence=presence)
    with presence.signing():
        said = {name: ADDRESS.sub("", repr(value)) for name, value in (settings or {}).items()}
        versions = {"engram": __version__, "torch": str(torch.__version__)}
        check_same(peers, "call", {"function": call, **said, **versions})
        with whole_weights(model):
            _compare_models(peers, model, buffers)
            if data is not None:
                check_same(peers, "examples", _of_data(data))
            yield peers


def _compare_models(peers: Processes, model: nn.Module, buffers: bool) -> None:
    inner = uncompiled(model)
    check_same(peers, "weights", _norms(dict(inner.named_parameters())))
    if buffers:
        check_same(peers, "statistics", _norms(dict(inner.named_buffers())))


def _norms(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Square norm, shape and whether it is trained, of each tensor by name."""
    return {
        name: [
            float(wide(t.detach()).square().sum()) if t.is_floating_point() else 0.0,
            list(t.shape),
            t.requires_grad,
        ]
        for name, t in named.items()
    }


def _of_data(data: Data) -> dict[str, Any]:
    """How many examples there are, and sums over what some of them have."""
    batches = Batches(data, 1)
    found: dict[str, Any] = {"number of examples": batches.num_data}
    for index in spread(batches.num_data, COMPARED).tolist():
        one = batches.take(torch.tensor([index]))
        tensors = [*tensors_of(one.inputs), one.targets]
        found[f"example {index}"] = [_weighted_sum(t) for t in tensors]
    return found


def _weighted_sum(values: Tensor) -> float:
    """A number that tells values in another order apart."""
    flat = wide(values.detach().flatten().cpu())
    places = torch.arange(1, len(flat) + 1, dtype=flat.dtype)
    return float((flat * (1 + 1 / places)).sum())


def check_same(peers: Processes, kind: str, own: Mapping[str, Any]) -> None:
    """ModelMismatchError where a process has something else than the first."""
    first, *others = peers.told(kind, own)
    told = []
    for rank, said in enumerate(others, start=1):
        names = [*first, *(name for name in said if name not in first)]
        other = [name for name in names if not _equal(first.get(name), said.get(name))]
        if other:
            more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
            told.append(f"process {rank} ({', '.join(other[:NAMED])}{more})")
    if told:
        raise ModelMismatchError(
            "processes that share one model and its data",
            f"other {kind} than on process 0 on {', '.join(told)}",
            f"{REMEDIES[kind]}; where each process has a model of its own, use across_ranks=False",
        )


def _equal(one: Any, other: Any) -> bool:
    """The same but for rounding."""
    if isinstance(one, float) and isinstance(other, float):
        near = abs(one - other) <= SAME_NUMBER * max(abs(one), abs(other))
        return near or one == other or (one != one and other != other)
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_equal(a, b) for a, b in pairs)
    return bool(one == other)
