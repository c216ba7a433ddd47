"""GPyTorch, imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engram.core.errors import ArgumentError


def gpytorch() -> Any:
    """The library, or an error that says how to get it."""
    try:
        return import_module("gpytorch")
    except ImportError as error:
        raise ArgumentError(
            "GPyTorch to be installed", str(error), "pip install gpytorch, or engram[gp]"
        ) from error
