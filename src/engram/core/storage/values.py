"""Nested values as JSON holds them, with the tensors taken out and put back.

JSON has no tensor, no NaN and no infinity. Each stands as an object with one key: ``{"tensor":
"name"}``, ``{"float": "nan"}``. Numbers of numpy become numbers, tuples lists, members of an
enumeration their values, and a dataclass an object of its fields. Back from JSON, the annotations
of the dataclass say what every field must be; a wrong one is named, not guessed.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import or_
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from engram.errors import EngramError, StorageError

TENSOR, FLOAT = "tensor", "float"  # keys of objects that stand for what JSON has not
UNUSUAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Limits of what is written: what lies beyond is no record, and would take long to read or write
MOST_BITS = 1024  # of a whole number, in records of the user's own
LARGEST_INTEGER = 2**53  # of a field: up to here every reader of JSON agrees
DEEPEST_NESTING = 50  # objects in objects; one that contains itself ends there
ADDED_LATER = {"added_later": True}  # metadata of fields that earlier versions have not written
VARIANT = "kind"  # key of the name that tells which of several classes an object is of
Reader = Callable[[Any, str], Any]  #: of a value and the words for where it stood
WRITERS: dict[type, Callable[[Any], Any]] = {}  # plain values of classes that are no dataclasses


def init_fields(value: Any) -> dict[str, Any]:
    """What a dataclass is made of, by name."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def taken_apart(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """What JSON can hold, and the tensors by the names that stand for them there.

    Example:
        >>> taken_apart({"score": torch.ones(2), "seed": np.int64(3), "prior": math.nan})
        ({'score': {'tensor': 'score'}, 'seed': 3, 'prior': {'float': 'nan'}}, \
{'score': tensor([1., 1.])})
    """
    tensors: dict[str, Tensor] = {}
    return _plain(value, (), tensors), tensors


def put_together(value: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    """What :func:`taken_apart` was given, with lists for tuples and objects for dataclasses."""
    left = dict(tensors)
    whole = _restored(value, left, where)
    if left:
        raise StorageError(
            f"tensors that {where} names", f"another one, {next(iter(left))!r}", "save it again"
        )
    return whole


def as_read(value: Any) -> Any:
    """What would be read if this were saved: what could not be read is not worth saving."""
    return put_together(*taken_apart(value), "what is saved")


def _plain(value: Any, place: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if len(place) > DEEPEST_NESTING:
        raise _unsaved(place, f"more than {DEEPEST_NESTING} objects in each other")
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise _unsaved(place, f"a tensor that is {value.layout} on {value.device}")
        name = "/".join(place)
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise _unsaved(place, f"a whole number of {value.bit_length():,} bits")
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: str(value)}
    value = _as_fields(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, place, tensors)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(inner, (*place, str(n)), tensors) for n, inner in enumerate(value)]
    raise _unsaved(place, type(value).__name__)


def _as_fields(value: Any) -> Any:
    """What an object is written as: by the writer of its class, or as the fields it is made of."""
    own = next((WRITERS[cls] for cls in type(value).__mro__ if cls in WRITERS), None)
    if own is not None:
        return own(value)
    made = is_dataclass(value) and not isinstance(value, type)
    return init_fields(value) if made else value


def _plain_mapping(
    value: Mapping[Any, Any], place: tuple[str, ...], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    if set(value) in ({TENSOR}, {FLOAT}):
        raise _unsaved(place, f"an object whose only key is {next(iter(value))!r}")
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if not isinstance(key, str | int | np.integer) or str(key) in found:
            raise _unsaved(place, f"the key {key!r}")
        found[str(key)] = _plain(inner, (*place, str(key)), tensors)
    return found


def _restored(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if isinstance(value, list):
        return [_restored(inner, tensors, f"{where}[{n}]") for n, inner in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if set(value) == {TENSOR}:
        name = value[TENSOR]
        if not isinstance(name, str) or name not in tensors:
            raise StorageError(f"the tensor {name!r} of {where}", "none", "save it again")
        return tensors.pop(name)
    if set(value) == {FLOAT}:
        name = value[FLOAT]
        if not isinstance(name, str) or name not in UNUSUAL:
            raise StorageError(f"a number in {where}", repr(name), "save it again")
        return UNUSUAL[name]
    return {key: _restored(inner, tensors, f"{where}: {key}") for key, inner in value.items()}


def _unsaved(place: tuple[str, ...], got: str) -> StorageError:
    return StorageError(
        "numbers, words, truth values, tensors, and lists and objects of them",
        f"{got} under {' / '.join(place[:8])}",
        "leave it out, or give it as words",
    )


def read_fields(
    kind: type[Any], values: Any, where: str, readers: Mapping[str, Reader] | None = None
) -> dict[str, Any]:
    """The fields of a dataclass, none missing, none beside them, each of its type.

    Those that were :data:`ADDED_LATER` may be missing: their defaults are what was before.

    Args:
        kind: the dataclass.
        values: what was read.
        where: it was read, for errors.
        readers: of fields that are not read by their annotation.
    """
    own = readers or {}
    hints = get_type_hints(kind)
    known = values if isinstance(values, dict) else {}
    wanted = [
        field.name
        for field in fields(kind)
        if field.init and (field.name in known or field.metadata != ADDED_LATER)
    ]
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
        engram.errors.StorageError: expected a whole number in seed; got '3'. What to do: ...
    """
    if kind is Any or kind is object:
        return value
    if kind in READERS:
        return READERS[kind](value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**read_fields(kind, value, where))
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = {member.value: member for member in kind}
        if not isinstance(value, str | int) or value not in known:
            raise wrong(where, f"one of {', '.join(map(str, known))}", value)
        return known[value]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType) and type(None) in inner:
        others = [part for part in inner if part is not type(None)]
        return None if value is None else typed(functools.reduce(or_, others), value, where)
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
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_INTEGER:
        raise wrong(where, "a whole number", value)
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(where, "a number", value)
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
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


READERS: dict[Any, Reader] = {  # by annotated type; classes that are checked further join them
    int: _whole,
    float: _number,
    str: _text,
    bool: _flag,
    Tensor: _tensor,
    torch.Size: _size,
}


def variants(base: Any, classes: Mapping[str, type[Any]]) -> None:
    """Have a field of the base class hold dataclasses that derive from it, each known by a name.

    Args:
        base: that fields are annotated with.
        classes: by the name that is written for each.
    """

    def writer(name: str) -> Callable[[Any], Any]:
        return lambda value: {VARIANT: name} | init_fields(value)

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict) or value.get(VARIANT) not in list(classes):
            raise wrong(where, f"an object of the kind {' or '.join(classes)}", value)
        cls = classes[value[VARIANT]]
        own = read_fields(cls, {k: v for k, v in value.items() if k != VARIANT}, where)
        try:
            return cls(**own)
        except (EngramError, RuntimeError, ValueError) as error:  # tensors of a wrong shape
            wanted = f"a {value[VARIANT]} that fits together in {where}"
            raise StorageError(wanted, str(error), "save it again") from error

    WRITERS.update({cls: writer(name) for name, cls in classes.items()})
    READERS[base] = read


def wrong(where: str, expected: str, got: Any) -> StorageError:
    """The StorageError for a value of a wrong type."""
    shown = f"a tensor {list(got.shape)}" if isinstance(got, Tensor) else repr(got)[:80]
    return StorageError(f"{expected} in {where}", shown, "save it again: it is damaged or edited")
