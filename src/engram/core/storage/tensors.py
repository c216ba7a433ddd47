"""Tensors by name in one safetensors file, which is written whole; no pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engram.core.errors import StorageError
from engram.core.storage.files import check_file, replacing

PIECE = 2**20


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None
) -> str:
    """Write them, with words about them in the header; SHA-256 of the file."""
    own = {name: _own(value) for name, value in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(own, temporary, None if header is None else dict(header))
        except (ValueError, SafetensorError) as error:
            raise StorageError(
                "tensors that safetensors can hold, and room for them",
                str(error),
                "make them dense, and check the free space",
            ) from error
        return digest_of(temporary)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and the header of a file.

    FileNotFoundError where there is none, StorageError where it cannot be read.
    """
    try:
        check_file(path)
        with safe_open(path, "pt", device=device) as opened:
            header = opened.metadata() or {}
            # copies: what is mapped from a file changes, or ends the process, when the file does
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}, header  # noqa: SIM118
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever the reader of another library makes of a damaged file
        path.stat()  # or of one that was removed while it read
        raise StorageError(
            "an undamaged file of tensors", f"{path}: {error}", "save it again"
        ) from error


def _own(tensor: Tensor) -> Tensor:
    """A copy with its numbers one after the other: views of one memory are not saved."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().clone()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    check_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
