"""SHA-256 of parts: equal only for equal lists of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def joined(tag: str, *parts: str | bytes | memoryview) -> bytes:
    """The digest of parts, each with its length, so that no two lists of them are alike.

    Example:
        >>> joined("a", "bc") == joined("ab", "c")
        False
    """
    digest = hashlib.sha256()
    for part in (tag, *parts):
        piece = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The entries in row order, as they are in memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
