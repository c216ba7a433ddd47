"""Kinds of things that are saved: each says once what it is made of and what must hold of it.

A kind stands beside its class: the name of its file, the number of its format, and a check of what
was read. All are written by one writer and read by one reader, :func:`load`, which knows every kind
that is declared. What could not be read again is not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engram.core.arguments import path_of, usable_device
from engram.core.storage.files import reason_of
from engram.core.storage.json_folder import read_folder, write_folder
from engram.core.storage.values import READERS, Reader, as_read, init_fields, read_fields
from engram.errors import ArgumentError, StorageError

T = TypeVar("T")
KINDS: dict[str, Kind[Any]] = {}  # by name; a kind is here once its module is imported
UNITS = "units"  # key of what is written for people to read, and not read again
REST = "..."  # in the axes of a column: any number of further ones
AGAIN = "save it again; where its numbers were wrong before, make it again"


@dataclass(frozen=True)
class Kind(Generic[T]):
    """How things of one class are written and read.

    Args:
        name: the thing is in the file ``NAME.json`` of its folder.
        version: of its format; another one is refused when it is read.
        made: the thing from what was read, or a StorageError; see :func:`checked`.
        content: what is written of a thing, by name: values and tensors.
        check: of the content before it is written; ``made``, unless that does more than look.
        units: of its columns, for people who read the file.
        completed: the thing with a likelihood that could not be saved, and was given to
            :func:`load`; None for kinds that have none.
        movable: whether its tensors may be on another device than the CPU.
        placed: the thing told the folder that it was read from, for kinds with files of their own.
    """

    name: str
    version: int
    made: Callable[[Any, str], T]
    content: Callable[[T], Mapping[str, Any]] = init_fields
    check: Reader | None = None
    units: Callable[[T], Mapping[str, str]] | None = None
    completed: Callable[[T, Any], T] | None = None
    movable: bool = False
    placed: Callable[[T, Path], T] | None = None

    def write(self, thing: T, folder: str | Path) -> Path:
        """Write it, whole or not at all; StorageError for what could not be read again."""
        content = dict(self.content(thing))
        (self.check or self.made)(as_read(content), f"{self.name}.json")
        about = {} if self.units is None else {UNITS: dict(self.units(thing))}
        return write_folder(folder, self.name, self.version, about | content)

    def read(self, folder: str | Path, device: str = "cpu") -> T:
        """What was written; StorageError where it is not there whole or not what it should be."""
        content = read_folder(folder, self.name, self.version, device if self.movable else "cpu")
        if self.units is not None and isinstance(content, dict):
            content.pop(UNITS, None)
        thing = self.made(content, f"{self.name}.json")
        return thing if self.placed is None else self.placed(thing, Path(folder))


def stored(kind: Kind[T]) -> Kind[T]:
    """Register a kind, so that :func:`load` can read it."""
    KINDS[kind.name] = kind
    return kind


def load(folder: str | Path, device: torch.device | str = "cpu", likelihood: Any = None) -> Any:
    """Read whatever engram has saved in a folder.

    A result, a posterior, a training, an assessment, a retraining, a truth by subsets, a
    verification, a certificate, a tuning or a history comes back as the object it was; of a tracker
    its state, for ``tracker.load_state_dict``.

    Args:
        folder: that it was saved in. Where several things are in one folder, the file of one of
            them: ``"run/result.json"``.
        device: of the model that a posterior is used with; everything else is on the CPU.
        likelihood: that a posterior was fitted with, where that was made from a function: functions
            are not saved. It must be the same as before.

    Raises:
        StorageError: where nothing of the kind is there, or it is damaged, or not finite.
    """
    place = str(usable_device(device))
    path, kind = _found(path_of("folder", folder))
    thing = kind.read(path, place)
    if likelihood is None:
        return thing
    if kind.completed is None:
        raise ArgumentError(
            "likelihood= for a posterior, whose likelihood may be a function that is not saved",
            f"likelihood= for a {kind.name}",
            "leave it out",
        )
    return kind.completed(thing, likelihood)


def _found(path: Path) -> tuple[Path, Kind[Any]]:
    """The folder and the kind of the one thing in it, or of the one whose file is named."""
    if path.suffix == ".json" and path.stem in KINDS and not path.is_dir():
        return path.parent, KINDS[path.stem]
    try:
        names = sorted(file.name for file in path.iterdir())
    except OSError as error:
        raise _nothing(f"{path}: {reason_of(error)}") from error
    found = [name for name in KINDS if f"{name}.json" in names]
    if not found:
        others = [name for name in names if name.endswith(".json")]
        raise _nothing(f"{path} with {', '.join(others[:4]) or 'none of them'}")
    if len(found) > 1:
        raise StorageError(
            f"one thing in {path}, or the name of its file",
            " and ".join(f"{name}.json" for name in found),
            f'name one, as in engram.load("{path / found[0]}.json")',
        )
    return path, KINDS[found[0]]


def _nothing(got: str) -> StorageError:
    kinds = ", ".join(f"{name}.json" for name in sorted(KINDS))
    return StorageError(
        f"a folder in which engram has saved something: {kinds}",
        got,
        "give the folder that was given to save",
    )


@dataclass(frozen=True)
class Column:
    """What a tensor of a saved thing must be.

    Args:
        axes: names of its axes, as in ``"N K"``. Axes of one name have one length throughout a
            thing, and none is empty; ``...`` at the end stands for any others.
        dtype: of its entries; ``float`` for floating-point numbers of any size, None for anything.
        finite: whether NaN and infinity are refused.
        low: the smallest entry that there may be.
        below: a number that all entries are below, or the name of an axis for its length.
    """

    axes: str
    dtype: torch.dtype | type[float] | None = float
    finite: bool = True
    low: float = -math.inf
    below: float | str = math.inf

    def check(self, name: str, value: Any, lengths: dict[str, int]) -> None:
        """StorageError unless a value is so; None, where a field may be None, is."""
        if isinstance(value, Mapping):
            for key, part in value.items():
                self.check(f"{name} of {key!r}", part, lengths)
        elif isinstance(value, Tensor):
            self._check_shape(name, tuple(value.shape), lengths)
            floating = self.dtype is float and value.is_floating_point()
            right = floating or self.dtype in (None, value.dtype)
            wanted = "floating-point numbers" if self.dtype is float else f"{self.dtype}"
            check_that(right, f"{name} of {wanted}", f"{value.dtype}")
            self._check_entries(name, value, lengths)
        elif value is not None:
            self._check_shape(name, (len(value),), lengths)

    def _check_shape(self, name: str, shape: tuple[int, ...], lengths: dict[str, int]) -> None:
        axes = self.axes.split()
        named = [axis for axis in axes if axis != REST]
        fits = len(shape) >= len(named) and (REST in axes or len(shape) == len(named))
        for axis, length in zip(named, shape, strict=False):
            fits = fits and length == lengths.setdefault(axis, length) > 0
        wanted = [str(lengths.get(axis, axis)) for axis in axes]
        check_that(fits, f"{name} of shape [{', '.join(wanted)}]", f"shape {list(shape)}")

    def _check_entries(self, name: str, value: Tensor, lengths: dict[str, int]) -> None:
        if self.finite:
            check_finite(name, value)
        below = lengths[self.below] if isinstance(self.below, str) else self.below
        if value.numel() and (self.low > -math.inf or below < math.inf):
            inside = bool((value >= self.low).all()) and bool((value < below).all())
            check_that(inside, f"{name} from {self.low:g} to below {below:g}", "others")


def numbers(axes: str, finite: bool = True, low: float = -math.inf) -> Column:
    """Floating-point numbers."""
    return Column(axes, float, finite, low)


def positions(axes: str, below: float | str = math.inf, dtype: torch.dtype = torch.int64) -> Column:
    """Whole numbers that count from 0."""
    return Column(axes, dtype, low=0, below=below)


def flags(axes: str) -> Column:
    """True or False."""
    return Column(axes, torch.bool)


def anything(axes: str) -> Column:
    """Entries of any type, or no tensor at all but something that has a length."""
    return Column(axes, None)


def checked(
    cls: type[T],
    columns: Mapping[str, Column],
    check: Callable[[T], None] | None = None,
    readers: Mapping[str, Reader] | None = None,
) -> Callable[[Any, str], T]:
    """A reader of a dataclass that also looks at what its tensors are, wherever one is read.

    Args:
        cls: the dataclass; the types of its fields are those of its annotations.
        columns: what its tensors must be, by field.
        check: of the thing itself, for what no column says.
        readers: of fields that are not read by their annotation.
    """

    def read(content: Any, where: str) -> T:
        values = read_fields(cls, content, where, readers)
        lengths: dict[str, int] = {}
        for name, column in columns.items():
            if name in values:  # fields that were added later may be missing
                column.check(name, values[name], lengths)
        thing = cls(**values)
        if check is not None:
            check(thing)
        return thing

    READERS[cls] = read
    return read


def check_that(good: bool, expected: str, got: str) -> None:
    """StorageError unless the condition holds."""
    if not good:
        raise StorageError(expected, got, AGAIN)


def check_numbers(what: str, value: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """StorageError unless these are finite numbers, of a shape where one is given."""
    check_that(value.is_floating_point(), f"numbers as {what}", f"{value.dtype}")
    right = shape is None or tuple(value.shape) == shape
    check_that(right, f"{what} of shape {shape}", f"{tuple(value.shape)}")
    check_finite(what, value)


def check_finite(what: str, value: Tensor) -> None:
    """StorageError where some are NaN or infinite."""
    count = int((~torch.isfinite(value)).sum())
    check_that(
        count == 0, f"finite {what}", f"{count:,} of {value.numel():,} numbers NaN or infinite"
    )
