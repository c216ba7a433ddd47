"""Sums in the widest precision that a device has, and factorisations in double precision.

Some devices, Apple's among them, have no double precision. There, sums are kept in single, and
matrices are factorised on the processor.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from engram.errors import NonFiniteError

WITHOUT_DOUBLE = frozenset({"mps"})  # types of devices
SMALLEST_DIVISOR = 1e-300  # in place of 0, so that a ratio of double precision stays a number


def widest(device: torch.device) -> torch.dtype:
    """The type in which sums are kept on a device.

    Example:
        >>> widest(torch.device("cpu")), widest(torch.device("mps"))
        (torch.float64, torch.float32)
    """
    return torch.float32 if device.type in WITHOUT_DOUBLE else torch.float64


def wide(tensor: Tensor) -> Tensor:
    """The tensor in its device's widest precision."""
    return tensor.to(widest(tensor.device))


def factorisable(tensor: Tensor) -> Tensor:
    """The tensor where it can be factorised: on the processor if not on its own device."""
    return tensor.cpu() if tensor.device.type in WITHOUT_DOUBLE else tensor


def in_double(tensor: Tensor) -> Tensor:
    """The tensor in double precision, on the processor where its own device has none."""
    return factorisable(tensor).double()


def eigh(matrix: Tensor, single: bool = False) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, found in double precision and given in the widest.

    In ``single`` precision they take half the time, and are as exact as sums of that precision.
    LAPACK does not always find them there: of a singular matrix with empty rows, which units that
    are never on leave, it may give up or give NaN. Then they are found in double.
    """
    if not matrix.isfinite().all():
        raise NonFiniteError(
            "finite sums of squares", "an overflow", "scale the inputs of the model, or its outputs"
        )
    values, vectors = _in_single(matrix) if single else torch.linalg.eigh(in_double(matrix))
    device, dtype = matrix.device, widest(matrix.device)
    return values.to(device, dtype), vectors.to(device, dtype)


def _in_single(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """In single precision, or in double where that fails."""
    with suppress(RuntimeError):  # what LinAlgError is
        values, vectors = torch.linalg.eigh(matrix.float())
        if values.isfinite().all() and vectors.isfinite().all():
            return values, vectors
    values, vectors = torch.linalg.eigh(in_double(matrix))
    return values, vectors
