"""Where a result came from: versions, settings and seed.

A record for people to read. Nothing is decided by it: what decides is a field of the result, of its
basis or of the posterior.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
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


def noted(record: Mapping[str, Any], **further: Any) -> dict[str, Any]:
    """The record with further settings; lists under a name that is there already go on.

    Example:
        >>> noted({"settings": {"seed": 0}}, refined=["solve"])
        {'settings': {'seed': 0, 'refined': ['solve']}}
        >>> noted({"settings": {"refined": ["solve"]}}, refined=["retrain"])
        {'settings': {'refined': ['solve', 'retrain']}}
    """
    settings = dict(record.get("settings", {}))
    for name, value in further.items():
        before = settings.get(name)
        settings[name] = before + value if isinstance(before, list) else value
    return {**record, "settings": settings}
