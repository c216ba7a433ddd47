"""Nested plain values and tensors in a folder: JSON beside safetensors, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from engram.errors import DataError

PLAIN, TENSORS = "tracker.json", "tracker.safetensors"
PARTS = ("history", "stream", "source")
TENSOR = "tensor"  # key of an entry that stands for a tensor


def check_state(state: Mapping[str, Any]) -> None:
    """DataError for what is not the state of a tracker."""
    missing = [part for part in PARTS if part not in state]
    if missing:
        raise DataError(
            f"a tracker's state_dict() with {', '.join(PARTS)}",
            f"one without {', '.join(missing)}",
            "load what tracker.state_dict() gave",
        )


def write_state(state: Mapping[str, Any], folder: str | Path) -> None:
    """Write dicts of plain values and tensors, nested in any way; keys are words.

    Args:
        state: what to write.
        folder: made if it is not there.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().contiguous().clone()
            return {TENSOR: name}
        if isinstance(value, Mapping):
            return {key: plain(inner) for key, inner in value.items()}
        return value

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(state), indent=2)
    save_file(tensors, path / TENSORS)
    (path / PLAIN).write_text(text + "\n")


def read_state(folder: str | Path) -> dict[str, Any]:
    """What :func:`write_state` wrote."""
    path = Path(folder)
    if not (path / PLAIN).is_file() or not (path / TENSORS).is_file():
        raise DataError(f"a folder with {PLAIN} and {TENSORS}", str(path), "check the path")
    tensors = load_file(path / TENSORS)

    def whole(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if set(value) == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: whole(inner) for key, inner in value.items()}

    found: dict[str, Any] = whole(json.loads((path / PLAIN).read_text()))
    return found
