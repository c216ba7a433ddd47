"""What is installed, what engram works with, and what the machine has."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engram._version import __version__
from engram.core.memory import available_bytes, in_words

PACKAGE = "engram"
NOT_FOR_USERS = ("test", "docs", "peers")  # extras of those who work on engram itself


@dataclass(frozen=True)
class Library:
    """A library that engram works with.

    Attributes:
        name: of its package.
        installed: its version; None where it is not installed.
        supported: versions that engram works with.
        extra: that asks for it; empty where it is needed always.
    """

    name: str
    installed: str | None
    supported: str
    extra: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is as it should be; optional ones may be missing."""
        if self.installed is None:
            return bool(self.extra)
        return SpecifierSet(self.supported).contains(self.installed, prereleases=True)


@dataclass(frozen=True)
class Installation:
    """Versions, threads and devices.

    Attributes:
        libraries: with their versions, the needed ones first.
        machine: facts about Python, processor, memory and devices, by name.
        advice: what to change.
    """

    libraries: tuple[Library, ...]
    machine: dict[str, str]
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every library is as it should be."""
        return all(library.fits for library in self.libraries)


def installation() -> Installation:
    """What is here.

    Example:
        >>> installation().machine["engram"] == __version__
        True
    """
    libraries = tuple(_libraries())
    return Installation(libraries, _machine(), tuple(_advice(libraries)))


def _libraries() -> list[Library]:
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # run from a folder of sources
        lines = []
    found: dict[str, Library] = {}
    for line in lines:
        requirement = Requirement(line)
        extra = _extra(requirement)
        if extra in NOT_FOR_USERS or requirement.name == PACKAGE:
            continue
        found.setdefault(
            requirement.name,
            Library(
                requirement.name, _version(requirement.name), str(requirement.specifier), extra
            ),
        )
    return sorted(found.values(), key=lambda library: (library.extra, library.name))


def _extra(requirement: Requirement) -> str:
    """The extra that a requirement is under; empty for one without."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return ""
    return str(requirement.marker).partition("extra ==")[2].strip().strip("\"'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, str]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    mps = torch.backends.mps.is_available()
    return {
        "engram": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(psutil.cpu_count(logical=False) or os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "memory": f"{in_words(available_bytes(torch.device('cpu')))} free",
        "device": "mps" if mps else f"{device.type} ({named})",
    }


def _advice(libraries: tuple[Library, ...]) -> list[str]:
    advice = []
    for library in libraries:
        if not library.fits:
            what = f"pip install '{library.name}{library.supported}'"
            advice.append(f"{what}: {library.installed or 'none'} is installed")
    cores, threads = psutil.cpu_count() or 1, torch.get_num_threads()
    if threads > cores:
        advice.append(
            f"OMP_NUM_THREADS={cores}: {threads} threads on {cores} cores wait on each other"
        )
    if not libraries:
        advice.append("pip install engram: it runs from its sources, so no versions are known")
    return advice
