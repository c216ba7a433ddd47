"""A run folder while its run goes on: one process at a time, and after a kill it goes on.

The training is kept as it is at the end of an epoch, every so many seconds, as one thing that is
whole or not there. A folder of another run, or of something else, is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engram.auditing.run_folder import (
    KIND,
    NEIGHBOURS,
    PAGE,
    RESULTS,
    ROWS,
    TABLE,
    THUMBNAILS,
    WEIGHTS,
)
from engram.core.storage.files import reason_of
from engram.core.storage.json_folder import read_folder, write_folder
from engram.errors import RunFolderError, StorageError

PROGRESS, VERSION = "progress", 1  # name and format of what is kept of an unfinished run
LOCK = ".lock"
KEPT_EVERY = 15.0  # seconds of training that a kill may cost


@dataclass
class RunInProgress:
    """The folder of a run that is being made.

    Args:
        folder: of the run.
        fingerprint: of data and settings, by which the same run is known again.
        settings: as they were given.
    """

    folder: Path
    fingerprint: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    _kept: float = field(default_factory=time.monotonic, init=False)

    def finished(self) -> Any:
        """The audit that is there already; None where it is not."""
        if not (self.folder / "run.json").exists():
            return None
        found = KIND.read(self.folder)
        if found.facts.get("fingerprint") != self.fingerprint:
            raise _another(self.folder, _difference(found.settings, self.settings))
        return found

    def state(self) -> Mapping[str, Any] | None:
        """What an interrupted run has kept; None where there is nothing."""
        if not (self.folder / f"{PROGRESS}.json").exists():
            return None
        content = read_folder(self.folder, PROGRESS, VERSION)
        if not isinstance(content, dict) or content.get("fingerprint") != self.fingerprint:
            raise _another(self.folder)
        return content.get("state")

    def keep(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Keep the state of the training, which ``state`` makes, where the last one is old."""
        if time.monotonic() - self._kept >= KEPT_EVERY:
            content = {"fingerprint": self.fingerprint, "state": state()}
            write_folder(self.folder, PROGRESS, VERSION, content)
            self._kept = time.monotonic()

    def clear(self) -> None:
        """Forget what was kept: the run is whole."""
        for path in [self.folder / f"{PROGRESS}.json", *self.folder.glob(f"{PROGRESS}-*")]:
            with suppress(OSError):
                path.unlink()


@contextmanager
def in_progress(
    folder: Path, fingerprint: str, settings: Mapping[str, Any]
) -> Iterator[RunInProgress]:
    """The folder, taken by this process until the block ends."""
    _check_ours(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(
            "a folder that can be written", f"{folder}: {reason_of(error)}", "give another folder"
        ) from error
    try:
        _take(lock, folder)
        yield RunInProgress(folder, fingerprint, settings)
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RunFolderError(
            "an output folder that no other run is using",
            f"{folder}, which another process writes to",
            "wait for it, or give another folder",
        ) from error


def _check_ours(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunFolderError("a folder for the run", f"the file {folder}", "give another name")
    beside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    own = any(name in beside for name in ("run.json", f"{PROGRESS}.json", LOCK))
    stopped = TABLE in beside and set(beside) <= {
        TABLE,
        ROWS,
        RESULTS,
        WEIGHTS,
        THUMBNAILS,
        NEIGHBOURS,
        PAGE,
    }  # in writing
    if beside and not (own or stopped):
        raise RunFolderError(
            "an empty folder, or that of an earlier run",
            f"{folder} with {', '.join(beside[:4])}",
            "give another folder",
        )


def _another(folder: Path, difference: str = "") -> RunFolderError:
    return RunFolderError(
        "the folder of this very run, with the same data and settings",
        f"{folder} of another one{difference}",
        "give another folder, or remove this one",
    )


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What two runs were given differently; else it is the data that changed, or the version."""
    changed = [
        f"{name} {there.get(name)!r} there, {value!r} here"
        for name, value in here.items()
        if there.get(name) != value
    ]
    return f": {'; '.join(changed) or 'the same settings, on other data'}"
