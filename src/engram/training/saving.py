"""The form of a record that is stored: plain values and tensors, checked when it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.core.storage.kinds import check_that
from engram.core.storage.values import ADDED_LATER, READERS, typed, wrong
from engram.training.checkpoints import Snapshot
from engram.training.clock import ParameterClock
from engram.training.order import StoredOrder
from engram.training.stopwatch import Stopwatch
from engram.training.visits import Visits


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot with its tensors, or with the name of the file that they are in."""

    step: int
    readings: tuple[float, ...]
    has_buffers: bool
    tensors: Mapping[str, Tensor]
    file: str | None
    sha256: str
    optimizer: str

    @classmethod
    def of(cls, snapshot: Snapshot) -> StoredSnapshot:
        """As it is, with copies of what is in memory."""
        tensors = {name: t.clone() for name, t in (snapshot.tensors or {}).items()}
        file = None if snapshot.file is None else snapshot.file.name
        common = (snapshot.step, tuple(snapshot.readings), snapshot.has_buffers)
        return cls(*common, tensors, file, snapshot.sha256, snapshot.optimizer)

    def opened(self, folder: Path | None) -> Snapshot:
        """The snapshot; its file is in this folder."""
        common = (self.step, list(self.readings), self.has_buffers)
        if self.file is None:
            return Snapshot(*common, dict(self.tensors), optimizer=self.optimizer)
        file = (folder or Path()) / self.file
        return Snapshot(*common, None, file, self.sha256, self.optimizer)


@dataclass(frozen=True)
class StoredTraining:
    """Everything of a record but the optimizer that it follows."""

    optimizer_name: str
    clocks: tuple[ParameterClock, ...]
    names: tuple[str, ...] | None
    num_steps: int
    num_missing_steps: int
    num_bad_steps: int
    sees_clipping: bool
    guessed: bool
    checkpoints: int
    stride: int
    snapshots: tuple[StoredSnapshot, ...]
    end: StoredSnapshot | None
    order: StoredOrder | None
    visits: Visits | None
    stopwatch: Stopwatch = field(default_factory=Stopwatch, metadata=ADDED_LATER)


def read(content: Any, where: str) -> StoredTraining:
    """What was stored; StorageError where it does not fit together."""
    found: StoredTraining = typed(StoredTraining, content, where)
    for number, clock in enumerate(found.clocks):
        for value in (clock.time, clock.decay, clock.carry):
            shape = tuple(value.shape) if isinstance(value, Tensor) else clock.shape
            finite = bool(torch.as_tensor(0.0 if value is None else value).isfinite().all())
            fits = f"finite times of shape {list(clock.shape)}"
            check_that(shape in (clock.shape, ()) and finite, fits, f"others in clock {number}")
        check_that(min(clock.shape, default=1) >= 0, "a shape", f"{clock.shape}")
    snapshots = [*found.snapshots, *([] if found.end is None else [found.end])]
    for one in snapshots:
        good = len(one.readings) <= len(found.clocks) and 0 <= one.step <= found.num_steps
        check_that(good, "checkpoints of the steps and parameters recorded", f"step {one.step:,}")
        check_that(one.file is None or Path(one.file).name == one.file, "a name", repr(one.file))
    steps = [one.step for one in snapshots]
    check_that(steps == sorted(set(steps)), "checkpoints in their order", f"steps {steps[:8]}")
    named = found.names is None or len(found.names) <= len(found.clocks)
    if found.visits is not None:
        found.visits.check_fit()
    watch = found.stopwatch
    timed = watch.intervals >= 0 and 0 <= watch.seconds < math.inf
    check_that(timed, "seconds of some steps", f"{watch}")
    good = named and min(found.num_steps, found.checkpoints, found.stride) >= 0
    check_that(good, "counts that are not negative, and a name for a parameter", "others")
    return found


def _tensor_or_number(value: Any, where: str) -> Tensor | float:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(where, "a tensor or a number", value)
    return float(value)


READERS[Tensor | float] = _tensor_or_number
