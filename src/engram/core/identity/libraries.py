"""Whose a module is: an installed library's, known by its version, or the user's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

from engram._version import __version__

UNKNOWN = "unknown version"


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
