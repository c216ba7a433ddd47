"""Every public name with its parameters and their defaults, as text.

``python -m tests.public_names`` writes what is compared, after a look at what changed.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import engram
from engram import errors, families, likelihoods, models, optimizers, recipes
from engram.models import gaussian_process
from engram.optimizers import ivon

STORED = Path(__file__).parent / "public_names.txt"
PUBLIC = (
    *(engram, errors, families, likelihoods, models, gaussian_process),
    *(optimizers, ivon, recipes),
)


def public_names() -> str:
    """One line for every function, class, and public part of a class."""
    lines = [line for module in PUBLIC for line in _module(module)]
    return "\n".join(lines) + "\n"


def changes() -> list[str]:
    """What is not as stored, as lines of a diff."""
    stored = STORED.read_text() if STORED.exists() else ""
    sides = [text.splitlines() for text in (stored, public_names())]
    return list(difflib.unified_diff(*sides, "stored", "now", n=0, lineterm=""))


def _module(module: ModuleType) -> Iterator[str]:
    listed = getattr(module, "__all__", None)
    if listed is None:  # what it defines itself
        listed = [n for n, v in vars(module).items() if _own(v, module) and not n.startswith("_")]
    for name in sorted(listed):
        value = getattr(module, name)
        place = f"{module.__name__}.{name}"
        if isinstance(value, ModuleType):
            yield f"module {place}"
        elif inspect.isclass(value):
            yield from _class(place, value)
        elif callable(value):
            yield f"{place}{_parameters(value)}"
        else:
            yield f"{place}: {type(value).__name__}"


def _own(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _class(place: str, kind: type) -> Iterator[str]:
    """The class, then its public attributes, those of its bases in engram included."""
    yield f"class {place}{_parameters(kind)}"
    parts: dict[str, str] = {}
    if is_dataclass(kind):
        parts |= {field.name: "" for field in fields(kind)}
    for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("engram")]):
        for name, value in vars(base).items():
            if not name.startswith("_"):
                parts[name] = _attribute(value)
    yield from (f"  {place}.{name}{text}" for name, text in sorted(parts.items()))


def _attribute(value: Any) -> str:
    if isinstance(value, classmethod | staticmethod):
        return _parameters(value.__func__)
    return _parameters(value) if inspect.isfunction(value) else ""


def _parameters(function: Any) -> str:
    """Names, kinds and defaults; annotations have a checker of their own."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


if __name__ == "__main__":
    print("\n".join(changes()) or "as stored")
    STORED.write_text(public_names())
