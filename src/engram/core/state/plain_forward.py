"""What a model asks of torch in its forward and does not get: half precision, and hidden graphs.

What leaving out one example changes is often less than the rounding of half precision: where a
forward enters ``torch.autocast``, it stays off. A reentrant checkpoint (``use_reentrant=True``)
hides its operations from all but ``backward()``: it is run as the other kind, which computes the
same and keeps as little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from engram.core.state.switches import Asked, Switches

_enter_autocast: Callable[[torch.autocast], Any] = torch.autocast.__enter__


def _enter_and_stay_off(own: torch.autocast) -> Any:
    found = _enter_autocast(own)
    if FORWARD.times_asked():  # other threads have what they ask for
        torch.set_autocast_enabled(own.device, False)
    return found


class _WithGraph:
    """In place of the reentrant checkpoint's function."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )


FORWARD = Switches(
    (
        (
            lambda: torch.autocast.__enter__,
            lambda own: setattr(torch.autocast, "__enter__", own),
            _enter_and_stay_off,
        ),
        (
            lambda: checkpoint.CheckpointFunction,
            lambda own: setattr(checkpoint, "CheckpointFunction", own),
            _WithGraph,
        ),
    )
)


class plain_forward(Asked):  # noqa: N801 (read as the statement that it is)
    """Full precision, and checkpoints whose operations can be seen, while this lasts.

    Example:
        >>> layer, x = torch.nn.Linear(2, 1), torch.ones(1, 2)
        >>> with plain_forward(), torch.autocast("cpu"):
        ...     layer(x).dtype
        torch.float32
    """

    switches = FORWARD
