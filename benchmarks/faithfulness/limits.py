"""What a method may use up on one problem: processor time and memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 60.0  # of processor time; a method that ends in one long call may take more
RETRAINING_SECONDS = 600.0  # the same where the model is trained again, which is no estimate
BYTES = 8 * 2**30  # of address space beside what the process has already
PAGES_FILE = "/proc/self/statm"


@contextmanager
def limited(seconds: float, size: int = BYTES) -> Iterator[None]:
    """TimeoutError after so many seconds; allocations beyond the size fail where they are made."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {seconds:g} s of processor time")

    handler = signal.signal(signal.SIGVTALRM, expire)
    allowed = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + size, allowed[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, allowed)
        signal.signal(signal.SIGVTALRM, handler)


def _address_space() -> int:
    """Bytes that the process has mapped."""
    with open(PAGES_FILE) as file:
        return int(file.read().split()[0]) * resource.getpagesize()
