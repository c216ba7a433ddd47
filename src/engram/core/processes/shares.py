"""Which part of the work is this process's, where all that processes share is a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from engram.core.arguments import AUTO, is_auto, shown
from engram.errors import ArgumentError

TORCHRUN = ("RANK", "WORLD_SIZE")
STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")  # of srun; in a batch script itself neither is set


@dataclass(frozen=True)
class Share:
    """This process among those that divide some work.

    Args:
        number: of this one, counted from 0.
        count: of all.
        at_once: whether the others run at the same time, and can be waited for.

    Example:
        >>> Share(1, 3).of([4, 5, 6, 7])
        [4, 7]
    """

    number: int = 0
    count: int = 1
    at_once: bool = True

    def of(self, numbers: list[int]) -> list[int]:
        """This process's part of the work, whatever of it the others have already seen done."""
        return [number for number in numbers if number % self.count == self.number]

    @classmethod
    def chosen(cls, share: tuple[int, int] | str = AUTO) -> Share:
        """The share that is given, or that of the environment; ArgumentError if it is none."""
        return cls.from_environment() if is_auto(share) else cls.given(share)

    @classmethod
    def given(cls, share: Any) -> Share:
        """``(number, of how many)``; the others may run at any time."""
        try:
            number, count = (int(value) for value in share)
            fine = 0 <= number < count
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise ArgumentError(
                "share=(number, of how many), the number counted from 0", repr(share), "use (0, 1)"
            )
        return cls(number, count, at_once=False)

    @classmethod
    def from_environment(cls) -> Share:
        """That of ``torchrun`` or of a step of SLURM; alone where there is none.

        Tasks of an array may each do something else, as in a search over settings: they pass
        their share themselves.
        """
        if any(_text(name) for name in TORCHRUN):
            return cls._ranked(*TORCHRUN)
        if _whole(STEP[1], 1) > 1:
            return cls._ranked(*STEP)
        return cls()

    @classmethod
    def _ranked(cls, rank: str, size: str) -> Share:
        count = _whole(size, 1)
        if count > 1 and rank not in os.environ:
            raise ArgumentError(
                f"{rank}, from 0 to {count - 1}, beside {size}={count}",
                "none in the environment",
                f"start the processes with torchrun or srun, or unset {size}",
            )
        number = _whole(rank, 0)
        if count < 1 or not 0 <= number < count:
            raise ArgumentError(
                f"{size} of at least 1, and {rank} from 0 to {size} - 1",
                f"{rank}={number} and {size}={count}",
                "start the processes with torchrun or srun, or unset both",
            )
        return cls(number, count)


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()


def _whole(name: str, otherwise: int) -> int:
    text = _text(name)
    try:
        return int(text) if text else otherwise
    except ValueError as error:
        raise ArgumentError(
            f"a whole number in the environment's {name}",
            shown(text),
            "start the processes with torchrun or srun, or unset it",
        ) from error
