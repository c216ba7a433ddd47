"""Checkpoints of a tracker: the state of its history and all its parts, to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram.core.processes.group import Processes
from engram.core.storage.kinds import Kind, stored
from engram.errors import DataError, StorageError
from engram.tracking.held_out import HeldOut
from engram.tracking.history import History
from engram.tracking.sources import Source
from engram.tracking.streaming import Stream
from engram.training.training import Training

PARTS = ("history", "stream", "source")
OPTIONAL = ("held_out", "training")


class Resumable(ABC):
    """Abstract: the half of a tracker that is saved and loaded."""

    history: History
    stream: Stream
    source: Source
    held_out: HeldOut | None
    folder: str | Path | None
    num_data: int

    @property
    @abstractmethod
    def peers(self) -> Processes:
        """The processes that train this model together."""

    @property
    @abstractmethod
    def own_record(self) -> Training | None:
        """The record that the tracker keeps by itself; one of the user's is saved by them."""

    @abstractmethod
    def _forget_latest(self) -> None:
        """Drop results from before a state was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, in plain values and tensors, for a torch checkpoint."""
        return {"history": self.history.state_dict()} | self._parts()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, also in the middle of a streamed epoch.

        Where a part of it is refused, everything is as before.
        """
        found = check_state(state)
        before, held = self._parts(), dict(vars(self.source))
        try:
            self._load_parts(found)
            history = History.of_state(found["history"], self.folder, self.num_data)
            if self.own_record is not None and "training" in found:
                self.own_record.load_state_dict(found["training"])
            self.history = history
        except BaseException:
            self._load_parts(before)
            vars(self.source).update(held)  # with what its state does not hold
            raise
        self._forget_latest()

    def save(self, folder: str | Path) -> Path:
        """Write everything needed to go on, whole; no pickle. Of several processes one writes."""
        if self.peers.rank:
            return Path(folder)
        return KIND.write({"history": self.history.whole_state()} | self._parts(), folder)

    def resume(self, folder: str | Path) -> None:
        """Resume from what :meth:`save` wrote, for instance beside a checkpoint."""
        self.load_state_dict(KIND.read(folder))

    def _parts(self) -> dict[str, Any]:
        """The state of everything but the history."""
        parts = {"stream": self.stream.state_dict(), "source": self.source.state_dict()}
        if self.held_out is not None:
            parts["held_out"] = self.held_out.state_dict()
        if self.own_record is not None:
            parts["training"] = self.own_record.times_state_dict()
        return parts

    def _load_parts(self, state: Mapping[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.source.load_state_dict(state["source"])
        if self.held_out is not None:
            self.held_out.load_state_dict(state.get("held_out", {}))
        elif "held_out" in state:
            raise DataError(
                "the state of a tracker without held-out examples",
                "that of one with them",
                "resume with the held_out= that the run was started with",
            )


def check_state(state: Any) -> dict[str, Any]:
    """StorageError for what is not the state of a tracker."""
    names = set(state) if isinstance(state, Mapping) else set()
    missing = [part for part in PARTS if part not in names]
    unknown = sorted(map(str, names - {*PARTS, *OPTIONAL}))
    if missing or unknown:
        raise StorageError(
            f"a tracker's state_dict() with {', '.join(PARTS)}",
            f"one without {', '.join(missing)}" if missing else f"one with {', '.join(unknown)}",
            "load what tracker.state_dict() gave",
        )
    return dict(state)


def _state(state: Any, where: str) -> Mapping[str, Any]:
    return check_state(state)


KIND: Kind[Mapping[str, Any]] = stored(Kind("tracker", 2, _state, content=dict))
