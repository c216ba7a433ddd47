"""Weights on the way of a training: a grid of snapshots that stays small however long it goes on.

The length of a training is not known beforehand. So a snapshot is taken every ``stride`` steps, and
whenever there are too many, every second one is dropped and the stride is doubled. Small ones stay
in memory, since most are dropped again; what would take more than :data:`MEMORY` goes to disk.
"""

from __future__ import annotations

import functools
import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engram.core.parameters import Named, uncompiled
from engram.core.state.modes_and_buffers import Buffers
from engram.core.storage.files import digest_of, read_tensors, write_tensors
from engram.core.storage.values import put_together, taken_apart
from engram.errors import ModelMismatchError, StorageError

NAMES = r"checkpoint-[0-9]{9,}-[0-9a-f]{16}\.safetensors"  # of files; others are the user's own
KEPT = 4  # snapshots for every checkpoint that is wanted, before every second one is dropped
MEMORY = 2**28  # bytes of snapshots in memory; written files take as long as a step or two
FIRST_STRIDE = 8  # steps between the first snapshots: a training of 100 steps has a dozen
FIRST_STRIDE_ON_DISK = 32  # the same where they are too large for memory
# What the tensors of a snapshot are: by number of the parameter; buffers by name. W is DECAY where
# it is there, else RATIO times C; and SHRUNK more.
WEIGHT, TIME, BUFFER = "weight", "time", "buffer"
DECAY, RATIO, SHRUNK = "decay", "ratio", "shrunk"
OPTIMIZER = "optimizer"


def key(kind: str, name: object) -> str:
    """The name of a tensor in a snapshot."""
    return f"{kind}/{name}"


@dataclass
class Snapshot:
    """Weights, C, W and buffers after a step, in memory or in a file.

    Args:
        step: after which it was taken; 0 is before the first.
        readings: mean of C over each parameter's entries.
        has_buffers: whether the model's buffers are in it.
        tensors: by kind and number of the parameter, or name of the buffer; None if in a file.
        file: that they are in.
        sha256: of the file.
        optimizer: the optimizer's state in JSON, with names for its tensors; empty if not kept.
    """

    step: int
    readings: list[float]
    has_buffers: bool
    tensors: dict[str, Tensor] | None
    file: Path | None = None
    sha256: str = ""
    optimizer: str = ""

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return 0 if self.tensors is None else self.size

    @functools.cached_property
    def size(self) -> int:
        """Bytes of its tensors, as they were taken."""
        return sum(t.numel() * t.element_size() for t in (self.tensors or {}).values())

    def read(self) -> dict[str, Tensor]:
        """Its tensors; StorageError where the file is gone or another one."""
        if self.tensors is not None:
            return self.tensors
        assert self.file is not None
        try:
            if digest_of(self.file) != self.sha256:
                raise StorageError(
                    f"the checkpoint of step {self.step:,} as it was written",
                    f"{self.file} with another content",
                    "train and record again, or use what needs no checkpoints: training.time",
                )
            return read_tensors(self.file)[0]
        except OSError as error:
            raise StorageError(
                f"the checkpoint of step {self.step:,}",
                f"no file {self.file}",
                "keep the folder of the record as long as it is used, or train again",
            ) from error

    def optimizer_state(self) -> dict[str, Any] | None:
        """The optimizer's state dict, where it is kept."""
        if not self.optimizer:
            return None
        start = key(OPTIMIZER, "")
        tensors = {n.removeprefix(start): t for n, t in self.read().items() if n.startswith(start)}
        copies = {name: t.clone() for name, t in tensors.items()}
        state: dict[str, Any] = put_together(
            json.loads(self.optimizer), copies, "the optimizer's state"
        )
        numbered = {int(k) if k.isdigit() else k: v for k, v in state["state"].items()}
        return state | {"state": numbered}

    def write(self, folder: Path) -> None:
        """Move it into a file of this folder."""
        tensors = self.read()
        self.file = folder / f"checkpoint-{self.step:09d}-{uuid.uuid4().hex[:16]}.safetensors"
        self.sha256 = write_tensors(self.file, tensors)
        self.tensors = None


def totals(tensors: Mapping[str, Tensor], number: int) -> tuple[Tensor, Tensor]:
    """C and W of a parameter in what :meth:`Snapshot.read` gives."""
    time = tensors[key(TIME, number)]
    coupled = tensors.get(key(DECAY, number))
    if coupled is None:
        coupled = tensors[key(RATIO, number)] * time
    return time, coupled + tensors[key(SHRUNK, number)]


@dataclass
class Grid:
    """The snapshots of a training.

    Args:
        wanted: checkpoints that will be asked for; 0 takes none.
        folder: that files are written to; a temporary one where None.
        num_steps: of the training, where they are known: no snapshot is taken in vain.
        max_bytes: that all snapshots may take together; the grid stays coarser for it.
    """

    wanted: int
    folder: Path | None = None
    num_steps: int | None = None
    max_bytes: int | None = None
    stride: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    _spare: list[dict[str, Tensor]] = field(default_factory=list)
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is to be taken after this step."""
        return bool(self.wanted and self.stride) and step % self.stride == 0

    def start(self, num_bytes: int) -> None:
        """Choose the first stride, for snapshots of this size."""
        self.stride = self.stride or self._first_stride(num_bytes)

    def _first_stride(self, num_bytes: int) -> int:
        if self.num_steps is not None:
            return max(1, self.num_steps // (2 * self.wanted))
        fit = KEPT * self.wanted * num_bytes <= MEMORY
        return FIRST_STRIDE if fit else FIRST_STRIDE_ON_DISK

    def add(self, snapshot: Snapshot) -> None:
        """Keep it; drop every second one where there are too many."""
        self.snapshots.append(snapshot)
        size = max(kept.size for kept in self.snapshots)
        most = KEPT * self.wanted
        if self.max_bytes is not None and size:
            most = min(most, max(2, self.max_bytes // size))
        while len(self.snapshots) > most:
            self._thin()
        in_memory = [kept for kept in self.snapshots if kept.tensors is not None]
        while sum(kept.num_bytes for kept in in_memory) > MEMORY:
            in_memory.pop(0).write(self.place())

    def _thin(self) -> None:
        self.stride *= 2
        kept = [s for s in self.snapshots if s.step % self.stride == 0]
        for snapshot in self.snapshots:
            if snapshot.step % self.stride == 0:
                continue
            if snapshot.tensors is not None:
                self._spare.append(snapshot.tensors)
            elif snapshot.file is not None:
                snapshot.file.unlink(missing_ok=True)
        self.snapshots = kept

    def place(self) -> Path:
        """The folder for files."""
        if self.folder is not None:
            return self.folder
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="engram-")
        return Path(self._temporary.name)

    def begin(self, step: int) -> Taking:
        """Take a snapshot, into memory of a dropped one where there is some."""
        return Taking(step, self._spare.pop() if self._spare else None)


class Times(Protocol):
    """C and W of a parameter."""

    def state(self) -> dict[str, Tensor]:
        """By kind: TIME, RATIO, SHRUNK, and DECAY where it is kept."""


class Taking:
    """A snapshot that is being taken, parameter by parameter.

    Args:
        step: after which.
        spare: memory of a snapshot that was dropped.
    """

    def __init__(self, step: int, spare: Mapping[str, Tensor] | None = None) -> None:
        self.step, self._spare = step, spare or {}
        self._tensors: dict[str, Tensor] = {}
        self._readings: dict[int, float] = {}
        self._optimizer = ""

    def add(self, number: int, parameter: Tensor, times: Times) -> None:
        """A parameter with its C and W."""
        found = times.state()
        self._readings[number] = float(found[TIME].mean())
        self._copy(key(WEIGHT, number), parameter)
        for kind, value in found.items():
            self._copy(key(kind, number), value)

    def add_optimizer(self, state: Mapping[str, Any]) -> None:
        """The state dict of the optimizer."""
        plain, tensors = taken_apart(state)
        self._optimizer = json.dumps(plain)
        for name, value in tensors.items():
            self._copy(key(OPTIMIZER, name), value)

    def finished(self, model: nn.Module | None) -> Snapshot:
        """The snapshot, with the model's buffers where it is given."""
        for name, buffer in model.named_buffers() if model is not None else ():
            self._copy(key(BUFFER, name), buffer)
        readings = [self._readings[number] for number in sorted(self._readings)]
        common = (self.step, readings, model is not None, self._tensors)
        return Snapshot(*common, optimizer=self._optimizer)

    def _copy(self, name: str, tensor: Tensor) -> None:
        """On the processor, into spare memory where there is some."""
        old = self._spare.get(name)
        with torch.no_grad():
            if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
                self._tensors[name] = old.copy_(tensor)
            else:
                self._tensors[name] = tensor.detach().to("cpu", copy=True)


def taken(
    step: int,
    parameters: Sequence[Tensor],
    times: Sequence[Times],
    model: nn.Module | None,
    optimizer: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A snapshot of what there is now.

    Args:
        step: after which.
        parameters: that the optimizer trains.
        times: C and W of each.
        model: whose buffers are taken too, if given.
        optimizer: its state dict, where it is to be kept.
    """
    taking = Taking(step)
    for number, (parameter, clock) in enumerate(zip(parameters, times, strict=True)):
        taking.add(number, parameter, clock)
    if optimizer is not None:
        taking.add_optimizer(optimizer)
    return taking.finished(model)


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a model after some step of its training.

    Args:
        step: after which; 0 is before the first.
        snapshot: where they are kept.
        numbers: of the parameters in the record, by name.
    """

    step: int
    snapshot: Snapshot = field(repr=False)
    numbers: Mapping[str, int] = field(repr=False)

    @property
    def has_buffers(self) -> bool:
        """Whether buffers, such as BatchNorm's statistics, were recorded with the weights."""
        return self.snapshot.has_buffers

    @property
    def weights(self) -> Named:
        """The weights by name, read from where they are kept."""
        tensors = self.snapshot.read()
        return {name: tensors[key(WEIGHT, number)] for name, number in self.numbers.items()}

    @property
    def buffers(self) -> Named:
        """The buffers by name, as far as they were recorded."""
        start = key(BUFFER, "")
        tensors = self.snapshot.read()
        return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}

    def put_into(self, model: nn.Module) -> None:
        """Give a model these weights and buffers, for good."""
        parameters = dict(model.named_parameters())
        weights = self.weights
        _check_fit(parameters, weights, self.step)
        _put(parameters, weights)
        _put(dict(model.named_buffers()), self.buffers)

    @contextmanager
    def loaded(self, model: nn.Module) -> Iterator[None]:
        """The model has these weights and buffers inside, and its own again after, always."""
        inner = uncompiled(model)
        parameters = dict(inner.named_parameters())
        _check_fit(parameters, self.weights, self.step)
        present = Buffers.now(inner)
        before = {name: parameters[name].detach().clone() for name in self.numbers}
        try:
            self.put_into(inner)
            yield
        finally:
            _put(parameters, before)
            present.restore()


def _put(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            if name in places:
                places[name].copy_(value)


def _check_fit(parameters: Mapping[str, Tensor], weights: Named, step: int) -> None:
    for name, value in weights.items():
        found = tuple(parameters[name].shape) if name in parameters else None
        if found != tuple(value.shape):
            raise ModelMismatchError(
                f"a model with {name!r} of shape {list(value.shape)}, as in the checkpoint of step "
                f"{step:,}",
                "none of that name" if found is None else f"shape {list(found)}",
                "pass the model that was trained",
            )


def relative_times(readings: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[float]:
    """How much of the whole training time had gone by at each reading, from 0 to 1.

    Args:
        readings: of C, averaged over each parameter's entries; the last one is the whole.
        sizes: entries of the parameters that count.
    """
    whole = readings[-1]
    used = [number for number, size in enumerate(sizes) if size and whole[number] > 0]
    total = sum(sizes[number] for number in used)
    return [
        sum(sizes[n] * row[n] / whole[n] for n in used if n < len(row)) / total for row in readings
    ]
