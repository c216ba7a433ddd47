"""What has been trained so far: in memory, and in a folder that outlives a kill at any moment.

A part is one safetensors file with a checksum inside, written under another name first and then
renamed, so that a file is either whole or not there. A file that was damaged later is noticed,
set aside as ``*.damaged``, and trained again.
"""

from __future__ import annotations

import json
import os
import uuid
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engram.errors import RunFolderError
from engram.identity.digests import of_tensors

FORMAT = 1
MANIFEST = "manifest.json"
Part = dict[str, Tensor]


class RunFolder:
    """Parts of a run, each with the kind of thing it holds.

    Args:
        path: the folder; None keeps the parts in memory only.
        fingerprint: of model, data and settings; a folder of another run is refused.
        settings: what the fingerprint was made from, for the reader.
    """

    def __init__(self, path: str | Path | None, fingerprint: str, settings: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.fingerprint = fingerprint
        self.parts: dict[str, tuple[str, Part]] = {}
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_manifest(settings)
            self.refresh()

    def of_kind(self, kind: str) -> list[Part]:
        """The parts of one kind, in a fixed order."""
        return [part for _, (found, part) in sorted(self.parts.items()) if found == kind]

    def write(self, kind: str, part: Part) -> None:
        """Add a part; on disk it is there whole or not at all."""
        part = {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}
        name = f"{kind}-{uuid.uuid4().hex}.safetensors"
        if self.path is not None:
            header = {
                "kind": kind,
                "fingerprint": self.fingerprint,
                "checksum": of_tensors(dict(sorted(part.items()))),
            }
            temporary = self.path / f".{name}.part"
            save_file(part, temporary, header)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(self.path / name)
        self.parts[name] = (kind, part)

    def refresh(self) -> int:
        """Read what other processes, or an earlier run, have added; how many parts are new."""
        if self.path is None:
            return 0
        before = len(self.parts)
        for file in sorted(self.path.glob("*.safetensors")):
            if file.name not in self.parts:
                found = self._read(file)
                if found is not None:
                    self.parts[file.name] = found
        return len(self.parts) - before

    def _read(self, file: Path) -> tuple[str, Part] | None:
        try:
            with safe_open(file, "pt") as opened:
                header = opened.metadata() or {}
                part = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
        except (SafetensorError, OSError, ValueError) as error:
            self._set_aside(file, str(error))
            return None
        reason = ""
        if header.get("checksum") != of_tensors(part):
            reason = "its checksum differs"
        elif header.get("fingerprint") != self.fingerprint:
            reason = "it belongs to another run"
        if reason:
            self._set_aside(file, reason)
            return None
        return header["kind"], part

    def _set_aside(self, file: Path, reason: str) -> None:
        warnings.warn(
            f"{file} is damaged ({reason}); it is kept as {file.name}.damaged and its copies are "
            "trained again",
            stacklevel=2,
        )
        file.replace(file.with_name(f"{file.name}.damaged"))

    def _check_manifest(self, settings: dict[str, Any]) -> None:
        assert self.path is not None
        file = self.path / MANIFEST
        wanted = {"format": FORMAT, "fingerprint": self.fingerprint, "settings": settings}
        found: dict[str, Any] = {}
        if file.is_file():
            try:
                found = json.loads(file.read_text())
            except ValueError:
                warnings.warn(f"{file} is damaged and written again", stacklevel=2)
        if found and found.get("fingerprint") != self.fingerprint:
            theirs = found.get("settings", {})
            differing = [k for k in settings if settings[k] != theirs.get(k)] or ["format"]
            raise RunFolderError(
                "an empty folder, or one of a run with the same model, data and settings",
                f"{self.path}, where {', '.join(differing)} differ"
                + ("s" if len(differing) == 1 else ""),
                "give another folder, or delete this one",
            )
        if found != wanted:
            temporary = self.path / f".{MANIFEST}.{uuid.uuid4().hex}"
            temporary.write_text(json.dumps(wanted, indent=2) + "\n")
            temporary.replace(file)
