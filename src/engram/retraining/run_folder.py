"""What has been trained so far: in memory, and in a folder that outlives a kill at any moment.

A part is one safetensors file with a checksum inside, written beside its place and renamed, so that
a file is either whole or not there. A file that was damaged later is noticed, set aside as
``*.damaged``, and trained again.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from engram.core.arguments import path_of
from engram.core.errors import FormatError, RunFolderError, StorageError
from engram.core.identity.digests import joined, of_tensors
from engram.core.storage.files import read_tensors, reason_of, remove_stale, write_tensors
from engram.core.storage.folder import read_folder, write_folder
from engram.core.storage.values import objects, taken_apart

FORMAT = 2  # of the manifest; a folder of another format is refused
MANIFEST = "manifest"
NEEDED = {  # tensors without which a part of this kind counts as damaged
    "refits": {"baseline", "refit_outputs", "gradient_norm", "wanted_norm"},
    "copies": {"number", "outputs_without", "gradient_norm", "wanted_norm"},
}
NAME = re.compile(rf"({'|'.join(NEEDED)})-[0-9a-f]{{32}}\.safetensors")
Part = dict[str, Tensor]


def check_folder(folder: Any) -> None:
    """Raise unless it can be the name of a folder, or None."""
    if folder is not None:
        path_of("folder", folder)


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
            try:
                self._check_manifest(self.path, settings)
                self.refresh()
            except OSError as error:
                raise StorageError(
                    "a folder that can be read", f"{path}: {reason_of(error)}", "check its rights"
                ) from error

    def of_kind(self, kind: str) -> list[Part]:
        """The parts of one kind, in a fixed order."""
        return [part for _, (found, part) in sorted(self.parts.items()) if found == kind]

    def write(self, kind: str, part: Part) -> None:
        """Add a part; on disk it is there whole or not at all."""
        part = {name: part[name].detach().cpu().contiguous() for name in sorted(part)}
        name = f"{kind}-{uuid.uuid4().hex}.safetensors"
        if self.path is not None:
            header = {"kind": kind, "fingerprint": self.fingerprint}
            header["checksum"] = _checksum(header, part)
            write_tensors(self.path / name, part, header)
        self.parts[name] = (kind, part)

    def refresh(self) -> int:
        """Read what other processes, or an earlier run, have added; how many parts are new."""
        if self.path is None:
            return 0
        before = len(self.parts)
        for file in _files(self.path):
            if file.name not in self.parts:
                found = self._read(file)
                if found is not None:
                    self.parts[file.name] = found
        return len(self.parts) - before

    def _read(self, file: Path) -> tuple[str, Part] | None:
        try:
            kind, fingerprint, part = _read_part(file)
        except FileNotFoundError:  # another process has set it aside
            return None
        except StorageError as error:
            self._set_aside(file, error.got)
            return None
        if fingerprint != self.fingerprint:
            self._set_aside(file, "it belongs to another run")
            return None
        return kind, part

    def _set_aside(self, file: Path, reason: str) -> None:
        warnings.warn(
            f"{file} is damaged ({reason}); it is kept as {file.name}.damaged and its copies are "
            "trained again",
            stacklevel=2,
        )
        with suppress(FileNotFoundError):
            file.replace(file.with_name(f"{file.name}.damaged"))

    def _check_manifest(self, path: Path, settings: dict[str, Any]) -> None:
        wanted, _ = taken_apart({"fingerprint": self.fingerprint, "settings": settings})
        found: dict[str, Any] = {}
        if (path / f"{MANIFEST}.json").is_file():
            found = self._read_manifest(path)
        if found and found["fingerprint"] != self.fingerprint:
            theirs = found["settings"] if isinstance(found["settings"], dict) else {}
            mine = wanted["settings"]
            raise _another_run(path, [key for key in mine if mine[key] != theirs.get(key)])
        if found != wanted:
            write_folder(path, MANIFEST, FORMAT, wanted)
        remove_stale(path / f"{MANIFEST}.json", NAME.pattern, {file.name for file in _files(path)})

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        """The manifest; where it is damaged, it is made again from the parts' own word."""
        try:
            content = read_folder(path, MANIFEST, FORMAT)
            return objects(content, f"{MANIFEST}.json", ("fingerprint", "settings"))
        except FormatError:
            raise
        except StorageError as error:
            for file in _files(path):
                with suppress(StorageError, FileNotFoundError):
                    if _read_part(file)[1] != self.fingerprint:
                        raise _another_run(path, []) from error
            warnings.warn(
                f"{path / MANIFEST}.json is damaged ({error.got}) and written again", stacklevel=2
            )
            return {}


def _files(path: Path) -> Iterator[Path]:
    """Parts of a run, and no file of anything else that is saved there."""
    return (file for file in sorted(path.iterdir()) if NAME.fullmatch(file.name))


def _read_part(file: Path) -> tuple[str, str, Part]:
    """Kind, fingerprint and tensors of a part; StorageError where they do not belong together."""
    tensors, header = read_tensors(file)
    part = {name: tensors[name] for name in sorted(tensors)}
    kind = header.get("kind", "")
    if header.get("checksum") != _checksum(header, part):
        raise StorageError("an undamaged part of a run", "its checksum differs", "train it again")
    if kind not in NEEDED or not NEEDED[kind] <= set(part):
        raise StorageError("refits or copies", f"{kind!r} with {sorted(part)}", "train it again")
    return kind, header.get("fingerprint", ""), part


def _checksum(header: dict[str, str], part: Part) -> str:
    words = [header.get(name, "") for name in ("kind", "fingerprint")]
    return joined("part of a run", *words, of_tensors(part)).hex()


def _another_run(path: Path, differing: list[str]) -> RunFolderError:
    names = differing or ["the fingerprint"]
    return RunFolderError(
        "an empty folder, or one of a run with the same model, data and settings",
        f"{path}, where {', '.join(names)} differ" + ("s" if len(names) == 1 else ""),
        "give another folder, or delete this one",
    )
