"""Tensors in safetensors and a description in JSON, side by side in a folder; no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engram.errors import DataError


def write_folder(
    folder: Path, kind: str, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> None:
    """Write ``KIND.safetensors`` and ``KIND.json``.

    Args:
        folder: is made where it is missing.
        kind: ``result``, ``posterior``: what is in it.
        tensors: by name.
        description: what JSON can hold; its ``format`` is asked for when it is read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(own, folder / f"{kind}.safetensors")
    (folder / f"{kind}.json").write_text(json.dumps(dict(description), indent=2) + "\n")


def read_folder(
    folder: Path, kind: str, version: int, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_folder` wrote: tensors and description; DataError where that fails."""
    files = [folder / f"{kind}.{ending}" for ending in ("safetensors", "json")]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"a folder written by {kind}.save", f"{folder} without {missing[0]}", "check the path"
        )
    try:
        tensors: dict[str, Tensor] = load_file(files[0], device=device)
        description = json.loads(files[1].read_text())
    except (ValueError, SafetensorError) as error:
        raise DataError(f"an undamaged {kind}", f"{folder}: {error}", "save it again") from error
    found = description.get("format") if isinstance(description, dict) else None
    if found != version:
        raise DataError(
            f"a {kind} in format {version}",
            f"format {found!r}",
            "read it with the version of engram that wrote it",
        )
    return tensors, description
