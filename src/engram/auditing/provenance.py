"""What a run depends on besides its data: versions, the commit, the machine."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import engram._version as own

LIBRARIES = ("torch", "numpy", "pandas", "scikit-learn", "pyarrow")
GIT_SECONDS = 5.0  # that git may take to say where it is


def provenance() -> dict[str, Any]:
    """Versions, the git commit of the working folder, and when."""
    return {
        "engram": own.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "git": _commit(),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit that the working folder is at; empty where there is none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
