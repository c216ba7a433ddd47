"""Which values outside of itself a function refers to: globals, closures, and what it imports.

A module is followed along the attributes that the code names, so that ``config.rate`` is that one
number. A module is an installed library's, known by its version, or the user's own, known by what
it holds.
"""

from __future__ import annotations

import dis
import importlib.metadata
import importlib.util
import platform
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from engram._version import __version__

ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")  # instructions that follow a name from a value
CLOSED_OVER = ("LOAD_DEREF", "LOAD_CLASSDEREF")  # instructions that read a closure
UNKNOWN = "unknown version"  # of an installed library that does not say


@dataclass(frozen=True)
class Undefined:
    """A name without a value."""

    name: str


@dataclass(frozen=True)
class NotImported:
    """A module that is loaded only when the function runs."""

    name: str


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code itself and all code that is defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def referred(function: FunctionType) -> dict[str, Any]:
    """Values by dotted name, sorted; builtins and names of libraries stand for themselves."""
    found: dict[str, Any] = {}
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for path in {path for code in codes(function.__code__) for path in _paths(code)}:
        kind, *names = path
        if kind == "import":
            owner: Any = _imported(names[0], function.__globals__)
        elif kind == "global":
            owner = _global(names[0], function.__globals__)
        elif names[0] in cells:
            owner = content(cells[names[0]], names[0])
        else:
            continue  # of a function around code that is inside this one
        name, value = _followed(owner, names)
        found[name] = value
    for name, cell in cells.items():  # also those that only code made by exec would name
        value = content(cell, name)
        if not isinstance(value, ModuleType):
            found[name] = value
    return dict(sorted(found.items()))


def _paths(code: CodeType) -> Iterator[tuple[str, ...]]:
    """``("global", "config", "rate")``: where a value is looked up, and by which names."""
    path: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()  # whose names are wanted, not the module as a whole
    for step in dis.get_instructions(code):
        if path and step.opname in ATTRIBUTES:
            path = (*path, str(step.argval))
            continue
        if step.opname == "IMPORT_FROM":
            imported = imported or path
            yield (*imported, str(step.argval))
            path = ()
            continue
        if path:
            yield path
            path = ()
        if step.opname == "IMPORT_NAME":
            path, imported = ("import", str(step.argval)), ()
        elif step.opname in CLOSED_OVER:
            path = ("closed over", str(step.argval))
        elif step.opname.startswith("LOAD") and ("GLOBAL" in step.opname or "NAME" in step.opname):
            path = ("global", str(step.argval))


def _followed(owner: Any, names: list[str]) -> tuple[str, Any]:
    """The value at the end of the names, as far as they lead through modules of the user's."""
    taken = 1
    while isinstance(owner, ModuleType) and taken < len(names):
        if library_version(owner.__name__) is not None:
            break
        owner = getattr(owner, names[taken], Undefined(names[taken]))
        taken += 1
    return ".".join(names[:taken]), owner


def _global(name: str, namespace: Mapping[str, Any]) -> Any:
    if name in namespace:
        return namespace[name]
    builtins = namespace.get("__builtins__", {})
    known = builtins if isinstance(builtins, Mapping) else vars(builtins)
    return known.get(name, Undefined(name))


def _imported(name: str, namespace: Mapping[str, Any]) -> Any:
    """A module that the function imports when it runs, where it has been loaded before."""
    nearby = f"{namespace.get('__package__') or ''}.{name}".strip(".")
    for candidate in (name, nearby):
        if candidate and candidate in sys.modules:
            return sys.modules[candidate]
    return NotImported(name)


def content(cell: Any, name: str) -> Any:
    """What a closure holds under a name, where it has been given a value."""
    try:
        return cell.cell_contents
    except ValueError:
        return Undefined(name)


@cache
def library_version(module: str) -> str | None:
    """The version of the library that a module belongs to; None for a module of the user's.

    Example:
        >>> library_version("torch.nn.functional") == library_version("torch")
        True
        >>> library_version("__main__") is None
        True
    """
    top = module.partition(".")[0]
    if top == "__main__":  # the user's, also where a library's command runs it
        return None
    if top == "engram":
        return __version__
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return platform.python_version()
    found = sys.modules.get(top)
    places = [getattr(found, "__file__", None), *getattr(found, "__path__", ())]
    if found is None:
        places = [_origin(top)]
    if not any(_is_installed(place) for place in places if place):
        return None
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:  # the package has another name: sklearn
        return str(getattr(found, "__version__", UNKNOWN))


def _origin(name: str) -> str | None:
    """The file of a module that is not loaded."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _is_installed(place: str) -> bool:
    path = Path(place).resolve()
    return any(path.is_relative_to(folder) for folder in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    """Folders that libraries are installed into."""
    named = sysconfig.get_paths()
    folders = {named["purelib"], named["platlib"], *site.getsitepackages()}
    folders.add(site.getusersitepackages())
    return tuple(Path(folder).resolve() for folder in sorted(folders))
