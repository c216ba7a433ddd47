"""Nested values as JSON holds them, with the tensors taken out and put back.

JSON has no tensor, no NaN and no infinity. Each stands as an object with one key: ``{"tensor":
"name"}``, ``{"float": "nan"}``. Numbers of numpy become numbers, tuples lists, members of an
enumeration their values, and a dataclass an object of its fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.core.errors import StorageError

TENSOR, FLOAT = "tensor", "float"  # keys of objects that stand for what JSON has not
UNUSUAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
LONGEST = 1024  # bits of a whole number
DEEPEST = 50  # objects in objects


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
    whole = _whole(value, left, where)
    if left:
        raise StorageError(
            f"tensors that {where} names", f"another one, {next(iter(left))!r}", "save it again"
        )
    return whole


def as_read(value: Any) -> Any:
    """What would be read if this were saved: what could not be read is not worth saving."""
    return put_together(*taken_apart(value), "what is saved")


def _plain(value: Any, place: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if len(place) > DEEPEST:
        raise _unsaved(place, f"more than {DEEPEST} objects in each other")
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
        if value.bit_length() > LONGEST:
            raise _unsaved(place, f"a whole number of {value.bit_length():,} bits")
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        value = init_fields(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, place, tensors)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(inner, (*place, str(n)), tensors) for n, inner in enumerate(value)]
    raise _unsaved(place, type(value).__name__)


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


def _whole(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if isinstance(value, list):
        return [_whole(inner, tensors, f"{where}[{n}]") for n, inner in enumerate(value)]
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
    return {key: _whole(inner, tensors, f"{where}: {key}") for key, inner in value.items()}


def _unsaved(place: tuple[str, ...], got: str) -> StorageError:
    return StorageError(
        "numbers, words, truth values, tensors, and lists and objects of them",
        f"{got} under {' / '.join(place[:8])}",
        "leave it out, or give it as words",
    )
