"""Saved folders that were changed afterwards, with checksums that fit the change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from engram.core.storage import json_folder as storage
from engram.core.storage.files import digest_of


def edit(
    path: Path,
    kind: str,
    change: Callable[[dict[str, Any]], Any] = lambda content: None,
    change_tensors: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
) -> None:
    """Change what a folder holds as someone would who knows the format: all checksums fit."""
    file = path / f"{kind}.json"
    document = json.loads(file.read_text())
    change(document["content"])
    if document["tensors"] is not None:
        named = json.dumps(document["content"])
        tensors = load_file(path / document["tensors"]["file"])
        tensors = {name: value for name, value in tensors.items() if json.dumps(name) in named}
        change_tensors(tensors)
        save_file(tensors, path / document["tensors"]["file"])
        document["tensors"]["sha256"] = digest_of(path / document["tensors"]["file"])
    document["sha256"] = storage._digest(document)
    file.write_text(json.dumps(document))


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
