"""A signal at a random time of a call, and what is found after it."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median
from types import FrameType
from typing import Any

from tests.snapshot import differences, snapshot

from benchmarks.reliability.works import WHOLE, Work

FORKED = get_context("fork")  # torch is imported once
LONGEST = 120.0  # seconds that a call may take


@dataclass(frozen=True)
class Outcome:
    """One signal: whether it came in time, what had changed, what was found, where it struck."""

    work: str
    delay: float
    struck: bool
    changed: list[str]
    found: str
    place: str = ""

    @property
    def fault(self) -> bool:
        """Whether anything is not as it was, or not whole."""
        return bool(self.changed) or self.found != WHOLE


def struck(outcomes: list[Outcome]) -> int:
    """How many signals came while the call was running."""
    return sum(outcome.struck for outcome in outcomes)


class Interruptible:
    """A handler of Ctrl-C that raises while a call runs, and at no other time."""

    def __init__(self) -> None:
        self.armed = False
        signal.signal(signal.SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise what Python's own handler raises."""
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def place_of_interrupt(self, call: Callable[[], object]) -> str | None:
        """Where the call was interrupted; None where it came to its end."""
        try:
            self.armed = True
            call()
            self.armed = False  # here: one that comes now is still caught
        except KeyboardInterrupt as interrupt:
            return place(interrupt)
        finally:
            self.armed = False
        return None


def place(interrupt: BaseException) -> str:
    """The last line of engram's own that was running."""
    frames = traceback.extract_tb(interrupt.__traceback__)
    own = [f for f in frames if f"{os.sep}engram{os.sep}" in f.filename] or list(frames)
    file = own[-1].filename.rpartition(f"{os.sep}engram{os.sep}")[2]
    return f"{Path(file).as_posix()}:{own[-1].lineno}"


def duration(work: Work, folder: Path) -> float:
    """Seconds of the call, uninterrupted."""
    seconds = []
    for _ in range(3):
        work.start(folder)
        began = time.perf_counter()
        work.run(folder)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def interrupts(work: Work, folder: Path, count: int, random: Random) -> list[Outcome]:
    """Ctrl-C until ``count`` came in time; one process takes them all unless it was changed."""
    longest = duration(work, folder)
    outcomes: list[Outcome] = []
    while struck(outcomes) < count:
        ours, theirs = FORKED.Pipe()
        process = FORKED.Process(target=_interrupted, args=(work, folder, theirs), daemon=True)
        process.start()
        assert process.pid is not None
        clean = True
        while clean and struck(outcomes) < count:
            ours.send("start")
            _receive(ours)
            delay = random.uniform(0, longest)
            time.sleep(delay)
            os.kill(process.pid, signal.SIGINT)
            ours.send("sent")
            outcomes.append(Outcome(work.name, delay, **_receive(ours)))
            clean = not outcomes[-1].changed
        process.kill()
        process.join()
    return outcomes


def _receive(connection: Connection) -> Any:
    if not connection.poll(LONGEST):
        raise SystemExit(f"expected an answer within {LONGEST:.0f} s, got none")
    return connection.recv()


def _interrupted(work: Work, folder: Path, connection: Connection) -> None:
    """In a process of its own: start, be interrupted, tell what has changed."""
    interruptible = Interruptible()
    while True:
        connection.recv()
        work.start(folder)
        before = snapshot(work.model)
        connection.send("running")
        other = ""  # Ctrl-C must come out as itself
        try:
            where = interruptible.place_of_interrupt(lambda: work.run(folder))
        except Exception as error:
            where, other = place(error), f"raised {type(error).__name__}: {error}"[:200]
        connection.recv()  # the signal is sent; one that came too late finds nobody armed
        changed = differences(before, snapshot(work.model))
        told = {"struck": where is not None, "changed": changed, "place": where or ""}
        connection.send(told | {"found": other or work.found(folder)})


def kills(work: Work, folder: Path, count: int, random: Random) -> list[Outcome]:
    """SIGKILL until ``count`` came in time, each to a process of its own."""
    longest = duration(work, folder)
    outcomes: list[Outcome] = []
    while struck(outcomes) < count:
        work.start(folder)
        process = FORKED.Process(target=work.run, args=(folder,), daemon=True)
        process.start()
        delay = random.uniform(0, longest)
        time.sleep(delay)
        process.kill()
        process.join()
        in_time = process.exitcode == -signal.SIGKILL
        outcomes.append(Outcome(work.name, delay, in_time, [], work.found(folder)))
    return outcomes
