"""Attention by plain operations: the fused kernels have no second derivative.

Which kernels are used is a setting of the whole process. So it is switched once, by the first
thread that asks, and back by the last one that is done, whatever order they end in.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

_cuda, _encoder = torch.backends.cuda, torch.backends.mha
# how to read one, how to set it, and what it is for plain attention
SWITCHES = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp, False),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp, False),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp, False),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp, True),
    (_encoder.get_fastpath_enabled, _encoder.set_fastpath_enabled, False),
)
_lock = threading.RLock()
_depth: dict[int, int] = {}  # how often each thread has asked
_before: list[bool] = []  # the switches as they were before the first thread asked


class plain_attention:  # noqa: N801 (read as the statement that it is)
    """Plain attention while this lasts, in any number of threads.

    Example:
        >>> with plain_attention():
        ...     torch.backends.cuda.flash_sdp_enabled()
        False
        >>> torch.backends.cuda.flash_sdp_enabled()
        True
    """

    def __enter__(self) -> None:
        self.depth = asked()
        reset(self.depth + 1)

    def __exit__(self, *failure: object) -> None:
        reset(self.depth)


def asked() -> int:
    """How often this thread has asked for plain attention."""
    return _depth.get(threading.get_ident(), 0)


def plain() -> bool:
    """Whether some thread has asked."""
    return bool(_before)


def reset(depth: int) -> None:
    """As if this thread had asked so often, whatever was left open; the kernels follow.

    Every step may be done twice, so that a Ctrl-C in between is mended by the next call.
    """
    with _lock:
        thread = threading.get_ident()
        _depth[thread] = depth
        if not depth:
            del _depth[thread]
        if _depth:
            if not _before:
                _before[:] = [read() for read, _, _ in SWITCHES]  # all at once, or none
            _switch([plain for _, _, plain in SWITCHES])
        elif _before:
            _switch(_before)
            _before.clear()


def _switch(values: Sequence[bool]) -> None:
    for (_, write, _), value in zip(SWITCHES, values, strict=True):
        write(value)
