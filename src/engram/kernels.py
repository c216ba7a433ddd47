"""Attention by plain operations: the fused kernels have no second derivative.

Which kernels are used is a setting of the whole process. So it is switched once, by the first
thread that asks, and back by the last one that is done, whatever order they end in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_lock = threading.RLock()
_depth: dict[int, int] = {}  # how often each thread has asked
_switched: list[AbstractContextManager[None]] = []


@contextmanager
def plain_attention() -> Iterator[None]:
    """Plain attention while this lasts, in any number of threads.

    Example:
        >>> with plain_attention():
        ...     torch.backends.cuda.flash_sdp_enabled()
        False
        >>> torch.backends.cuda.flash_sdp_enabled()
        True
    """
    depth = asked()
    try:
        reset(depth + 1)
        yield
    finally:
        reset(depth)


def asked() -> int:
    """How often this thread has asked for plain attention."""
    return _depth.get(threading.get_ident(), 0)


def plain() -> bool:
    """Whether some thread has asked."""
    return bool(_switched)


def reset(depth: int) -> None:
    """As if this thread had asked so often, whatever was left open; the kernels follow."""
    with _lock:
        thread = threading.get_ident()
        _depth[thread] = depth
        if not depth:
            del _depth[thread]
        if _depth and not _switched:
            switched = _plain()
            _switched.append(switched)
            switched.__enter__()
        elif not _depth and _switched:
            _switched[-1].__exit__(None, None, None)
            _switched.pop()


@contextmanager
def _plain() -> Iterator[None]:
    """The encoder layer's fast path is such a kernel too."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with sdpa_kernel(SDPBackend.MATH):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
