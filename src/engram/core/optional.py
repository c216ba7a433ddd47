"""Optional libraries, imported when they are asked for."""

from __future__ import annotations

import importlib
from typing import Any

from engram.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """The module; MissingExtraError that says what to install.

    Args:
        module: dotted name, such as ``lightning.pytorch``.
        extra: of engram's optional dependencies that brings it.

    Example:
        >>> require("math", "anything").floor(2.5)
        2
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"the library {module.partition('.')[0]!r}",
            f"{type(error).__name__}: {error}",
            f"pip install it, in a version that engram's extra {extra!r} in pyproject.toml allows",
        ) from error
