"""Who is there: signs of life in the store of a group of processes.

A collective operation that a dead process takes no part in fails after half an hour, or at once
with an error about a connection that names nobody. So every process leaves a sign of life in the
store of the group each second, and before an operation waits for the others by looking there: as
long as they live it may take as long as it takes, and where one has stopped it is known which.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from engram.errors import EngineError, EngramError, MemoryLimitError, brief

BEAT_SECONDS = 1.0  # between two signs of life
SILENT_SECONDS = 30.0  # without one after which a process counts as gone: swapping takes seconds
JOIN_SECONDS = 300.0  # for the others to make the same call; one may have more to load
LOOK_SECONDS = 0.25  # between two looks at the signs of those who are waited for
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks whether they have come

_calls = itertools.count()  # of this process, which all of them make in the same order


class Presence:
    """The signs of one call that all processes make.

    Args:
        rank: of this process.
        count: of how many.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.store = _own_store()
        self.call = next(_calls)
        self.number = 0  # of operations so far

    @contextmanager
    def signing(self) -> Iterator[None]:
        """Signs of life while this lasts; how it ends is told to the others."""
        ended = threading.Event()
        self._sign(0)
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be what is gone
                self._set("failed", json.dumps([brief(error), getattr(error, "examples", None)]))
            raise
        finally:
            ended.set()

    def arrive(self) -> None:
        """Wait until all processes have come as far; EngineError where one has stopped."""
        self.number += 1
        try:
            self._set("at", str(self.number))
            self._wait()
        except RuntimeError as error:  # of the store, which one of the processes holds
            raise _stopped(
                "the process that holds the store of the group does not answer", error
            ) from error

    def blame(self, error: RuntimeError) -> EngramError:
        """The error of an operation that failed, with the name of who has stopped."""
        others = self._others()
        watched = {rank: _Watched(self._beat_of(rank)) for rank in others}
        until = time.monotonic() + SILENT_SECONDS + 2 * BEAT_SECONDS
        while time.monotonic() < until:
            try:
                self._look(others, watched)
            except EngramError as found:
                return found
            except RuntimeError:  # the store is gone with its process
                break
            time.sleep(LOOK_SECONDS)
        return _stopped("the connection to one of the others is lost", error)

    def _wait(self) -> None:
        waiting, pause, looked = self._others(), SHORTEST_PAUSE, time.monotonic()
        watched = {rank: _Watched(None) for rank in waiting}
        while waiting := [rank for rank in waiting if self._number_of(rank) < self.number]:
            if time.monotonic() - looked > LOOK_SECONDS:
                self._look(waiting, watched)
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 1.5 * pause)

    def _look(self, waiting: list[int], watched: dict[int, _Watched]) -> None:
        """EngineError where one of them has said that it failed, or says nothing any more."""
        for rank in waiting:
            told = self._get("failed", rank)
            if told is not None:
                raise _failed(rank, *json.loads(told))
            beat = self._beat_of(rank)
            silent = watched[rank].seen(beat)
            if beat is None and silent > JOIN_SECONDS:
                raise EngineError(
                    f"all {self.count} processes to make this call together",
                    f"no sign of process {rank} within {JOIN_SECONDS / 60:.0f} minutes",
                    "call it on every rank; where each process has a model of its own, use "
                    "across_ranks=False",
                )
            if beat is not None and silent > SILENT_SECONDS:
                raise _stopped(f"no sign of life of process {rank} for {silent:.0f} seconds")

    def _others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.rank]

    def _beat(self, ended: threading.Event) -> None:
        for number in itertools.count(1):
            if ended.wait(BEAT_SECONDS):
                return
            try:
                self._sign(number)
            except RuntimeError:  # the process that held the store has gone, perhaps at its end
                return

    def _sign(self, number: int) -> None:
        self._set("beat", str(number))

    def _beat_of(self, rank: int) -> str | None:
        return self._get("beat", rank)

    def _number_of(self, rank: int) -> int:
        return int(self._get("at", rank) or 0)

    def _set(self, what: str, value: str) -> None:
        self.store.set(self._key(what, self.rank), value)

    def _get(self, what: str, rank: int) -> str | None:
        key = self._key(what, rank)
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _key(self, what: str, rank: int) -> str:
        return f"engram/{self.call}/{what}/{rank}"


class _Watched:
    """The last sign of a process, and when it was new."""

    def __init__(self, beat: str | None) -> None:
        self.beat, self.since = beat, time.monotonic()

    def seen(self, beat: str | None) -> float:
        """Seconds since its last sign was new."""
        if beat != self.beat:
            self.beat, self.since = beat, time.monotonic()
        return time.monotonic() - self.since


def _own_store() -> Any:
    """A connection to the store of the default group for this alone, where the store has them."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _failed(rank: int, told: str, examples: int | None) -> EngramError:
    if examples is not None:  # all of them begin again with half of it
        found = MemoryLimitError(
            "enough memory on every process", f"process {rank}: {told}", "use a smaller model"
        )
        found.examples = examples
        return found
    return _stopped(f"process {rank} stopped with {told}")


def _stopped(got: str, error: Exception | None = None) -> EngineError:
    return EngineError(
        "all processes to go on to the end",
        got if error is None else f"{got} ({brief(error)})",
        "look at the output of that process, and start all of them again; what was written to a "
        "folder is kept, and the run goes on there",
    )
