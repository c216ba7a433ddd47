"""Errors of the user's model and data, told as such."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engram.errors import EngineError, EngramError, brief


@contextmanager
def running_on(what: str) -> Iterator[None]:
    """Errors of another kind than ours come from the model that runs inside, or its inputs."""
    try:
        yield
    except EngramError:
        raise
    except Exception as error:  # whatever a forward pass raises
        raise EngineError(
            f"a model that runs on {what}",
            brief(error),
            "check shapes and types of the inputs against those of the weights",
        ) from error
