"""Errors that say what was expected, what came, and what to do about it."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "DataError",
    "DesignError",
    "EngineError",
    "EngramError",
    "FormatError",
    "LikelihoodError",
    "MemoryLimitError",
    "MissingExtraError",
    "ModelMismatchError",
    "NonFiniteError",
    "PosteriorError",
    "RunFolderError",
    "SeparationError",
    "StorageError",
    "TargetError",
    "TrainingError",
    "UnsupportedModelError",
]


def brief(error: BaseException) -> str:
    """Another library's error in one short line; some go on with a page of details."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def interruption(error: BaseException) -> KeyboardInterrupt | None:
    """The Ctrl-C that another error stands in for: one that came up while that was on its way."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt):
            return found
        seen.add(id(found))
        found = found.__context__
    return None


class EngramError(Exception):
    """Base of every error that engram raises on purpose."""

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        self.expected, self.got, self.remedy = expected, got, remedy
        super().__init__(f"expected {expected}; got {got}. What to do: {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors come back from other processes as what they are."""
        return type(self), (self.expected, self.got, self.remedy), vars(self)


class ArgumentError(EngramError, ValueError):
    """An argument has a value that no call accepts."""


class MemoryLimitError(EngramError, MemoryError):
    """More memory than there is; ``examples`` at a time, where fewer of them might do."""

    examples: int | None = None


class DataError(EngramError, ValueError):
    """The data cannot be read in a fixed order, is empty, or has the wrong form."""


class StorageError(DataError):
    """Something saved that is missing, damaged, mixed or of another format, or cannot be saved."""


class FormatError(StorageError):
    """Something saved by a version of engram that wrote it in another way."""


class TargetError(EngramError, ValueError):
    """Targets that the likelihood has no meaning for."""


class NonFiniteError(EngramError, ValueError):
    """NaN or infinity in an input, a weight, an output or a loss."""


class LikelihoodError(EngramError, ValueError):
    """A likelihood that is unknown, or a loss that is not one number per example."""


class PosteriorError(EngramError, ValueError):
    """A precision that is not positive definite, or a structure that cannot be fitted."""


class ModelMismatchError(EngramError, ValueError):
    """A posterior that belongs to another model, or to other weights of this one."""


class EngineError(EngramError, RuntimeError):
    """The tangent pass cannot handle this model."""


class MissingExtraError(EngramError, ImportError):
    """An optional library that is not installed."""


class DesignError(EngramError, ValueError):
    """A design matrix that, with these targets, does not determine the coefficients."""


class SeparationError(DesignError):
    """Targets that a combination of columns tells apart, so that its coefficients are infinite."""


class UnsupportedModelError(EngramError, TypeError):
    """A fitted model of another library that there is no adapter for."""


class TrainingError(EngramError, RuntimeError):
    """A training function that gives back nothing usable, changes its data, or diverges."""


class RunFolderError(EngramError, ValueError):
    """A folder that holds another run, or that the other processes have not completed."""
