"""Where a result came from: versions, settings and seed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import torch

import engram._version as version
from engram.core.storage.values import typed


def check_provenance(found: Mapping[str, Any]) -> None:
    """StorageError unless the settings that are printed are words, where there are any."""
    settings = typed(Mapping[str, Any], found.get("settings", {}), "provenance: settings")
    layers = settings.get("in_eval_mode") or []
    typed(tuple[str, ...], layers, "provenance: settings: in_eval_mode")


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
