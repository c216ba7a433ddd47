"""Several processes that share a run folder, as ``torchrun`` starts them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engram.errors import ArgumentError, RunFolderError
from engram.retraining.run_folder import RunFolder

PAUSE_SECONDS = 0.2
PATIENCE_SECONDS = 1800.0  # without anything new from the others


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and of how many."""

    rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """From RANK and WORLD_SIZE; alone where they are not set."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

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


def wait_until(complete: Callable[[], bool], run: RunFolder) -> None:
    """Wait for the other processes' parts; an error where nothing new comes for long."""
    last = time.monotonic()
    while not complete():
        if run.refresh():
            last = time.monotonic()
        elif time.monotonic() - last > PATIENCE_SECONDS:
            raise RunFolderError(
                "the other processes to write their parts",
                f"nothing new in {run.path} for {PATIENCE_SECONDS / 60:.0f} minutes",
                "start the run again: it goes on with what is missing",
            )
        else:
            time.sleep(PAUSE_SECONDS)
