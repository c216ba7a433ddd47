"""Where a result came from: versions, settings and seed."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from typing import Any

import torch

import engram._version as version


def provenance(model: object, settings: dict[str, Any]) -> dict[str, Any]:
    """A record that goes with every result."""
    return {
        "engram": version.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": type(model).__name__,
        "settings": settings,
    }
