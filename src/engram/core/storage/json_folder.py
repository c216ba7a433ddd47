"""One thing that is saved: a description in ``KIND.json``, and the tensors that it names.

The tensors go into a new file first, ``KIND-....safetensors``, which nobody reads yet. The
description, with the name and the SHA-256 of that file and of its own content, is renamed into its
place last: this one rename is the moment at which the new thing replaces the old one. A kill leaves
the old or the new, two savers leave that of the last one, and a description never comes with the
tensors of another.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from engram.core.arguments import path_of, shown
from engram.core.storage.files import (
    check_free,
    digest_of,
    read_bytes,
    read_tensors,
    reason_of,
    remove_stale,
    write_tensors,
    write_text,
)
from engram.core.storage.values import put_together, taken_apart
from engram.errors import FormatError, StorageError

KEYS = ("engram", "format", "tensors", "content", "sha256")  # of every description
NAME = r"{kind}-[0-9a-f]{{16}}\.safetensors"  # of files of tensors; others are the user's own
READ_ATTEMPTS = 20  # to read a folder that another process replaces meanwhile, before an error


def write_folder(folder: str | Path, kind: str, version: int, content: Any) -> Path:
    """Save a thing, whole or not at all.

    Args:
        folder: is made where it is missing; things of other kinds in it stay.
        kind: ``result``, ``posterior``: what it is.
        version: of its content; another one is refused when it is read.
        content: nested values, with tensors anywhere in them.
    """
    path = path_of("folder", folder)
    plain, tensors = taken_apart(content)
    check_free(path / f"{kind}.json")
    document: dict[str, Any] = {"engram": kind, "format": version, "tensors": None}
    if tensors:
        name = f"{kind}-{uuid.uuid4().hex[:16]}.safetensors"
        document["tensors"] = {"file": name, "sha256": write_tensors(path / name, tensors)}
    document["content"] = plain
    document["sha256"] = _digest(document)
    own, before = _file_of(document["tensors"], kind), _tensors_in_place(path, kind)
    try:
        write_text(path / f"{kind}.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
    finally:
        _remove_unnamed(path, kind, (own, before))
    names = rf"{NAME.format(kind=kind)}|{kind}\.json"
    remove_stale(path / f"{kind}.json", names, {own, f"{kind}.json"})
    return path


def read_folder(folder: str | Path, kind: str, version: int, device: str = "cpu") -> Any:
    """What :func:`write_folder` was given; StorageError where it is not there whole."""
    path = path_of("folder", folder)
    meant = f"a folder written by {kind}.save"
    try:
        for _ in range(READ_ATTEMPTS):
            text = read_bytes(path / f"{kind}.json", meant)
            document = _parsed(text, path / f"{kind}.json")
            _check(document, kind, version, path)
            try:
                tensors = _tensors(path, kind, document["tensors"], device)
            except FileNotFoundError:  # replaced since: what replaced it is there by now
                if read_bytes(path / f"{kind}.json", meant) != text:
                    continue
                raise
            return put_together(document["content"], tensors, f"{kind}.json")
    except OSError as error:
        raise _damaged(path, f"its tensors: {reason_of(error)}") from error
    except RecursionError as error:
        raise _damaged(path, f"{kind}.json has objects in objects without end") from error
    raise _damaged(path, "it is replaced faster than it can be read")


def _parsed(text: bytes, path: Path) -> Any:
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise _damaged(path.parent, f"{path.name}: {reason[:200]}") from error


def _number(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _no_number(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _check(document: Any, kind: str, version: int, path: Path) -> None:
    if not isinstance(document, dict):
        raise _damaged(path, f"{kind}.json holds {type(document).__name__}, not an object")
    found = document.get("format")
    if found != version or isinstance(found, bool) or document.get("engram", kind) != kind:
        raise FormatError(
            f"a {kind} in format {version}",
            f"{path} with {shown(document.get('engram', kind))} in format {shown(found)}",
            "read it with the version of engram that wrote it, or make it and save it again",
        )
    if set(document) != set(KEYS):
        raise _damaged(path, f"{kind}.json has the keys {', '.join(sorted(document))[:200]}")
    if document["sha256"] != _digest(document):
        raise _damaged(path, f"{kind}.json differs from its own checksum")


def _tensors(path: Path, kind: str, named: Any, device: str) -> dict[str, Tensor]:
    if named is None:
        return {}
    name = _file_of(named, kind)
    if name is None:
        raise _damaged(path, f"{kind}.json names no file of tensors")
    if digest_of(path / name) != named.get("sha256"):
        raise _damaged(path, f"{name} differs from its checksum in {kind}.json")
    return read_tensors(path / name, device)[0]


def _file_of(named: Any, kind: str) -> str | None:
    """The name of a file in what a description says about its tensors; never one of another's."""
    name = named.get("file") if isinstance(named, dict) else None
    known = isinstance(name, str) and re.fullmatch(NAME.format(kind=kind), name)
    return name if known else None


def _tensors_in_place(path: Path, kind: str) -> str | None:
    """The file of tensors that the description names that is there now."""
    file = path / f"{kind}.json"
    try:
        document = _parsed(read_bytes(file, "a description"), file)
    except StorageError:
        return None
    return _file_of(document.get("tensors"), kind) if isinstance(document, dict) else None


def _remove_unnamed(path: Path, kind: str, names: Iterable[str | None]) -> None:
    """Tensors of which the description in place does not speak: names are not used twice.

    It is asked itself, because an interrupt may come right after its rename, or another saver.
    """
    try:
        text = read_bytes(path / f"{kind}.json", "a description").decode("utf-8", "replace")
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            return
        text = ""
    for name in names:
        if name is not None and name not in text:
            with suppress(OSError):
                (path / name).unlink()


def _digest(document: dict[str, Any]) -> str:
    """SHA-256 of everything in a description but this, whatever its layout."""
    content = {key: document[key] for key in KEYS if key != "sha256"}
    return hashlib.sha256(_canonical(content)).hexdigest()


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _damaged(path: Path, got: str) -> StorageError:
    return StorageError("an undamaged folder", f"{path}: {got}", "save it again")
