"""Free memory, errors where it is not enough, and repeating a call with smaller batches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch

from engram.errors import MemoryLimitError, brief

P = ParamSpec("P")
R = TypeVar("R")
# Of per-example gradients [B, P] that are held at once: less memory against smaller products
GRADIENT_BYTES = 128 * 2**20
GROUP = Path("/sys/fs/cgroup")  # where Linux tells the memory limit of a container
REFUSALS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)  # words of torch's errors


def available_bytes(device: torch.device) -> int:
    """Memory that is free now, within the limits of the process and of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [int(psutil.virtual_memory().available), _free_in_process(), _free_in_container()]
    return max(0, min(number for number in free if number is not None))


def _free_in_process() -> int | None:
    """What is left of the address space that the process may take (``ulimit -v``)."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return limit - int(psutil.Process().memory_info().vms)


def _free_in_container() -> int | None:
    """What is left of the memory of a control group, cached files aside."""
    try:
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        lines = (GROUP / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file"))
    except (OSError, ValueError, StopIteration):  # no such group, or "max"
        return None
    return limit - used + cached


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or Python says that an allocation failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in REFUSALS)


UNITS = {9: "GB", 6: "MB", 3: "kB"}  # by the power of ten


def in_words(size: float) -> str:
    """A number of bytes as text.

    Example:
        >>> in_words(102.4e9), in_words(5e6), in_words(1.6e4)
        ('102 GB', '5 MB', '16 kB')
    """
    power = 9 if size >= 1e9 else 6 if size >= 1e6 else 3
    return f"{size / 10**power:.3g} {UNITS[power]}"


def check_room(size: float, device: torch.device, what: str, remedy: str) -> None:
    """MemoryLimitError if so many bytes are not free."""
    free = available_bytes(device)
    if size > free:
        raise MemoryLimitError(f"{in_words(size)} of memory for {what}", in_words(free), remedy)


@contextmanager
def short_of_memory() -> Iterator[list[int]]:
    """Allocations that fail while this lasts are a MemoryLimitError.

    Whoever knows it puts into the list how many examples are held at a time.
    """
    examples: list[int] = []
    try:
        yield examples
    except MemoryLimitError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        told = f" with {examples[-1]:,} examples at a time" if examples else ""
        found = MemoryLimitError(
            f"enough memory{told}", brief(error), "use a smaller model or fewer outputs"
        )
        found.examples = examples[-1] if examples else None
        raise found from error


def backing_off(function: Callable[P, R]) -> Callable[P, R]:
    """Have a call that runs out of memory repeated with half the examples at a time.

    The function has an argument ``batch_size``, on which its result does not depend.
    """

    @functools.wraps(function)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = dict(kwargs)
        while True:
            try:
                return function(*args, **given)
            except MemoryLimitError as error:
                if error.examples is None or error.examples < 2:
                    raise
                held, fewer = error.examples, error.examples // 2
            warnings.warn(
                f"out of memory with {held} examples at a time; trying {fewer}", stacklevel=2
            )
            given["batch_size"] = fewer

    return repeated
