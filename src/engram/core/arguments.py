"""Numbers, paths and devices that a caller gives, checked in one way wherever they enter.

numpy's integers are integers, and truth values are not numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.errors import ArgumentError

AUTO = "auto"  # of an argument: engram chooses, and the repr of what comes back says what
LARGEST_SEED = 2**63 - 1  # the largest that torch's generators take
SHOWN_LENGTH = 80  # characters of a wrong value in an error message, so that it fits a line
MANY = 10_000  # rounds, probes or samples that may be asked for; more would not end in a day


def whole(
    name: str, value: Any, low: int = 1, high: int | None = None, remedy: str | None = None
) -> int:
    """An integer from ``low`` to ``high``, as Python's own.

    Example:
        >>> import numpy as np
        >>> whole("rounds", np.int64(3))
        3
    """
    proper = isinstance(value, Integral) and not isinstance(value, bool)
    if proper and low <= value and (high is None or value <= high):
        return int(value)
    reach = f"of at least {low:,}" if high is None else f"from {low:,} to {high:,}"
    raise ArgumentError(f"a whole {name} {reach}", shown(value), remedy or f"use {name}={low}")


def is_auto(value: Any) -> bool:
    """Whether the choice is left to engram."""
    return isinstance(value, str) and value == AUTO


def seed_number(value: Any) -> int:
    """A seed that every generator takes."""
    return whole("seed", value, 0, LARGEST_SEED, "use seed=0")


def positive(name: str, value: Any, remedy: str | None = None) -> float:
    """A finite number above 0."""
    if is_number(value) and 0 < value < math.inf:
        return float(value)
    raise ArgumentError(f"a positive {name}", shown(value), remedy or f"use {name}=1.0")


def fraction(name: str, value: Any, remedy: str | None = None) -> float:
    """A number above 0 and below 1."""
    if is_number(value) and 0 < value < 1:
        return float(value)
    raise ArgumentError(f"a {name} between 0 and 1", shown(value), remedy or f"use {name}=0.5")


def truth(name: str, value: Any) -> bool:
    """A bool; 0, 1 and other values that only convert to one are refused.

    Example:
        >>> import numpy as np
        >>> truth("intercept", np.True_)
        True
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ArgumentError(f"{name} to be True or False", shown(value), f"use {name}=True")


def one_of(name: str, value: Any, names: Collection[str], remedy: str) -> str:
    """One of some names.

    Example:
        >>> one_of("at", "displaced", ("displaced", "linearised"), 'use "displaced"')
        'displaced'
    """
    if isinstance(value, str) and value in names:
        return value
    raise ArgumentError(f"{name} to be one of {', '.join(names)}", shown(value), remedy)


def path_of(kind: str, value: Any) -> Path:
    """The path of a folder or a file, given as a string or a ``Path``."""
    if isinstance(value, str | Path) and value != "" and "\0" not in str(value):
        return Path(value)
    raise ArgumentError(f"the name of a {kind}", shown(value), 'use "run"')


def usable_device(value: Any) -> torch.device:
    """A ``torch.device`` that exists on this machine."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            "a device that tensors can be put on", f"{shown(value)}: {reason}", 'use "cpu"'
        ) from error
    if device.type == "meta":
        raise ArgumentError("a device that holds numbers", shown(value), 'use "cpu"')
    return device


def is_number(value: Any) -> bool:
    """Whether it is a real number, NaN and infinity included; bools are not numbers."""
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 3]}..."
