"""The command that makes an audit again, as one would type it."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping
from typing import Any

IN_MEMORY = "in memory"  # how a setting ends that no file has


def command_of(settings: Mapping[str, Any]) -> str:
    """What to type for these settings, or to call where they are nothing that can be typed.

    Args:
        settings: of the run, as ``run.json`` has them.

    Example:
        >>> command_of({"data": "my data.csv", "label": ["sun", "sea"], "seed": 0, "minimal": True})
        "engram audit 'my data.csv' --label sun --label sea --minimal"
        >>> command_of({"data": "a DataFrame in memory", "group_by": "day"})
        "engram.audit(data, group_by='day')"
    """
    changed = {name: value for name, value in settings.items() if value != _usual(name)}
    data = changed.pop("data", None)
    if any(str(value).endswith(IN_MEMORY) for value in (data, *changed.values())):
        return f"engram.audit({', '.join(_arguments(data, changed))})"
    parts = ["engram", "audit", str(data)]
    for name, value in changed.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list | tuple) else [value]:
            parts += [option] if one is True else [option, str(one)]
    return shlex.join(parts)


def _arguments(data: Any, changed: Mapping[str, Any]) -> list[str]:
    """Of a call; what was in memory by its name."""
    named = {"data": data, **changed}
    words = {k: k if str(v).endswith(IN_MEMORY) else repr(v) for k, v in named.items()}
    return [words.pop("data"), *(f"{name}={word}" for name, word in words.items())]


def _usual(name: str) -> Any:
    """The value of a setting that nobody gave."""
    from engram.auditing.audit import audit

    known = inspect.signature(audit).parameters.get(name)
    return None if known is None else known.default
