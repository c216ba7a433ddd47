"""Several processes that share a run folder, as ``torchrun`` starts them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engram.core.errors import ArgumentError, RunFolderError
from engram.core.progress import Bar
from engram.core.storage.files import write_text
from engram.retraining.run_folder import RunFolder

# How long a process waits for the others: longer is safer for slow copies, and hides a dead process
PAUSE_SECONDS = 0.2  # between two looks into the folder
PATIENCE_SECONDS = 1800.0  # without anything new from processes that have joined
JOIN_SECONDS = 300.0  # without a sign of a process that is waited for


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and of how many."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ArgumentError(
                "WORLD_SIZE of at least 1, and RANK from 0 to WORLD_SIZE - 1",
                f"RANK={self.rank} and WORLD_SIZE={self.world_size}",
                "start the processes with torchrun, or unset both",
            )

    @classmethod
    def from_environment(cls) -> Ranks:
        """From RANK and WORLD_SIZE; alone where they are not set."""
        size = _from_environment("WORLD_SIZE", 1)
        if size > 1 and "RANK" not in os.environ:
            raise ArgumentError(
                f"RANK, from 0 to {size - 1}, beside WORLD_SIZE={size}",
                "none in the environment",
                "start the processes with torchrun, or unset WORLD_SIZE",
            )
        return cls(_from_environment("RANK", 0), size)

    def check_folder(self, folder: object) -> None:
        """Several processes find each other's copies through a folder."""
        if self.world_size > 1 and folder is None:
            raise ArgumentError(
                "folder=, which all processes can read and write",
                f"none in a run of {self.world_size} processes",
                "name a folder that they share",
            )

    def share(self, numbers: Sequence[int]) -> list[int]:
        """This process's part of the work, whatever of it the others have already seen done."""
        return [number for number in numbers if number % self.world_size == self.rank]

    def owners(self, numbers: Sequence[int]) -> list[int]:
        """The processes that have these copies to train."""
        return sorted({number % self.world_size for number in numbers})

    @contextmanager
    def taking_part(self, run: RunFolder) -> Iterator[None]:
        """A sign in the folder while this process is at work: the others wait longer for it."""
        if self.world_size == 1 or run.path is None:
            yield
            return
        sign = run.path / self._sign(self.rank)
        write_text(sign, "")
        try:
            yield
        finally:
            sign.unlink(missing_ok=True)

    def absent(self, run: RunFolder, ranks: Sequence[int]) -> list[int]:
        """Those that have left no sign."""
        if run.path is None:
            return []
        return [rank for rank in ranks if not (run.path / self._sign(rank)).exists()]

    def _sign(self, rank: int) -> str:
        return f"process-{rank}-of-{self.world_size}"


@dataclass(frozen=True)
class Patience:
    """Seconds to wait for others: for a sign of them, and for anything new from them."""

    join: float = JOIN_SECONDS
    silence: float = PATIENCE_SECONDS


def wait_until_done(
    missing: Callable[[], Sequence[int]],
    run: RunFolder,
    ranks: Ranks,
    progress: bool,
    patience: Patience | None = None,
) -> None:
    """Wait for the other processes' parts; an error where nothing new comes for long.

    Args:
        missing: numbers of the copies that are not there yet.
        run: where they are looked for.
        ranks: which of the processes have to train them.
        progress: show what is waited for, and for whom.
    """
    limits, last, before = patience or Patience(), time.monotonic(), missing()
    with Bar(len(before), "waiting", progress) as bar:
        while left := missing():
            owners = ranks.owners(left)
            bar.describe(f"waiting for {_processes(owners)}")
            if run.refresh():
                last = time.monotonic()
            silent = time.monotonic() - last
            if silent > limits.join and (absent := ranks.absent(run, owners)):
                raise _missing(run, absent, f"no sign of {_processes(absent)}", silent, len(left))
            if silent > limits.silence:
                raise _missing(run, owners, "nothing new", silent, len(left))
            bar.update(len(before) - len(left) - bar.count)
            time.sleep(PAUSE_SECONDS)


def _missing(
    run: RunFolder, owners: Sequence[int], what: str, seconds: float, copies: int
) -> RunFolderError:
    return RunFolderError(
        f"{_processes(owners)} to write their parts of the run",
        f"{what} in {run.path} for {seconds / 60:.0f} minutes, with {copies} missing",
        "see that all processes run with the same folder and settings, and start again: the run "
        "goes on with what is missing",
    )


def _processes(ranks: Sequence[int]) -> str:
    plural = "es" if len(ranks) > 1 else ""
    return f"process{plural} {', '.join(map(str, ranks))}"


def _from_environment(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else otherwise
    except ValueError as error:
        raise ArgumentError(
            f"a whole number in the environment's {name}",
            repr(text)[:80],
            "start the processes with torchrun, or unset it",
        ) from error
