"""From what JSON held to the types that a dataclass asks for; a wrong one is named, not guessed."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from engram.core.errors import StorageError

LARGEST = 2**53  # whole numbers that every reader of JSON agrees on
Reader = Callable[[Any, str], Any]


def read_fields(
    kind: type[Any], values: Any, where: str, readers: Mapping[str, Reader] | None = None
) -> dict[str, Any]:
    """The fields of a dataclass, none missing, none beside them, each of its type.

    Args:
        kind: the dataclass.
        values: what was read.
        where: it was read, for errors.
        readers: of fields that are not read by their annotation.
    """
    own = readers or {}
    hints = get_type_hints(kind)
    wanted = [field.name for field in fields(kind) if field.init]
    found = objects(values, where, wanted)
    return {
        name: own[name](found[name], f"{where}: {name}")
        if name in own
        else typed(hints[name], found[name], f"{where}: {name}")
        for name in wanted
    }


def objects(value: Any, where: str, names: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """An object with exactly these keys."""
    if not isinstance(value, dict):
        raise wrong(where, "an object", value)
    missing = [name for name in names if name not in value]
    beside = [name for name in value if name not in names]
    if missing or beside:
        got = f"none of the name {missing[0]!r}" if missing else f"{beside[0]!r} as well"
        raise StorageError(
            f"{where} with {', '.join(names)}", got, "save it again: it is damaged or edited"
        )
    return value


def typed(kind: Any, value: Any, where: str) -> Any:
    """A value of an annotated type.

    Example:
        >>> typed(tuple[float, ...], [1, 2.5], "quantiles")
        (1.0, 2.5)
        >>> typed(int, "3", "seed")
        Traceback (most recent call last):
        engram.core.errors.StorageError: expected a whole number in seed; got '3'. What to do: ...
    """
    if kind is Any or kind is object:
        return value
    if kind in SIMPLE:
        return SIMPLE[kind](value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**read_fields(kind, value, where))
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = {member.value: member for member in kind}
        if not isinstance(value, str | int) or value not in known:
            raise wrong(where, f"one of {', '.join(map(str, known))}", value)
        return known[value]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType) and type(None) in inner and len(inner) == 2:
        other = next(part for part in inner if part is not type(None))
        return None if value is None else typed(other, value, where)
    if origin is tuple and inner[1:] == (...,):
        if not isinstance(value, list | tuple):
            raise wrong(where, "a list", value)
        return tuple(typed(inner[0], part, f"{where}[{n}]") for n, part in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and inner[0] is str:
        if not isinstance(value, dict):
            raise wrong(where, "an object", value)
        return {key: typed(inner[1], part, f"{where}: {key}") for key, part in value.items()}
    raise TypeError(f"{where} is annotated as {kind}, which is not read")


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST:
        raise wrong(where, "a whole number", value)
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(where, "a number", value)
    if isinstance(value, int) and abs(value) > LARGEST:
        raise wrong(where, "a number", value)
    return float(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise wrong(where, "words", value)
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(where, "true or false", value)
    return value


def _tensor(value: Any, where: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise wrong(where, "a tensor", value)
    return value


def _size(value: Any, where: str) -> torch.Size:
    if not isinstance(value, list):
        raise wrong(where, "a shape", value)
    sizes = [_whole(part, f"{where}[{n}]") for n, part in enumerate(value)]
    if any(size < 0 for size in sizes):
        raise wrong(where, "a shape", value)
    return torch.Size(sizes)


SIMPLE: dict[Any, Reader] = {
    int: _whole,
    float: _number,
    str: _text,
    bool: _flag,
    Tensor: _tensor,
    torch.Size: _size,
}


def wrong(where: str, expected: str, got: Any) -> StorageError:
    """For a value that is not what it should be."""
    shown = f"a tensor {list(got.shape)}" if isinstance(got, Tensor) else repr(got)[:80]
    return StorageError(f"{expected} in {where}", shown, "save it again: it is damaged or edited")
