"""What a caller gives, as float64 tensors, or an error that says what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.errors import ArgumentError, DataError, NonFiniteError, TargetError

# by which a covariance may differ from its transpose: what a product of matrices leaves
SYMMETRIC = 1e-10  # relative
SYMMETRIC_NEAR_ZERO = 1e-12  # in its own unit, for entries that would be 0


def read_array(values: Any, name: str) -> Tensor:
    """A finite float64 tensor on the CPU; the caller's own array is not changed."""
    try:
        if not isinstance(values, Tensor) and hasattr(values, "to_numpy"):  # a series or frame
            values = np.array(values, dtype=np.float64)
        array = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} as an array of numbers",
            f"{type(values).__name__}: {error}",
            "pass a list, a numpy array or a tensor",
        ) from error
    if not torch.isfinite(array).all():
        place = tuple((~torch.isfinite(array)).nonzero()[0].tolist())
        raise NonFiniteError(
            f"finite {name}", f"NaN or infinity at {place}", "clean the data, or leave it out"
        )
    return array


def read_numbers(values: Any, name: str) -> Tensor:
    """One number per example, [N]; a column [N, 1] is taken for that."""
    array = read_array(values, name)
    if array.dim() == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dim() != 1:
        raise DataError(
            f"{name} with one number per example",
            f"shape {tuple(array.shape)}",
            "pass a list of numbers",
        )
    return array


def read_vectors(values: Any, name: str, size: int) -> Tensor:
    """One vector per example, [N, size]; an empty list is no examples."""
    array = read_array(values, name)
    if array.numel() == 0 and array.shape[:1] == (0,):
        return array.new_zeros(0, size)
    if array.dim() == 1 and size == 1:
        array = array[:, None]
    if array.dim() != 2 or array.shape[1] != size:
        raise DataError(
            f"{name} of shape (N, {size})",
            f"shape {tuple(array.shape)}",
            "give one row per example, as wide as the family was made for",
        )
    return array


def read_pair(data: Any, first: str, second: str) -> tuple[Any, Any]:
    """Two arrays that belong together."""
    if isinstance(data, tuple | list) and len(data) == 0:
        return [], []
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError(
            f"a pair ({first}, {second})", type(data).__name__, "pass both as one tuple"
        )
    return data[0], data[1]


def check_lengths(first: Tensor, second: Tensor, names: str) -> None:
    """DataError unless both have one row per example."""
    if len(first) != len(second):
        raise DataError(
            f"{names} of one length",
            f"{len(first)} and {len(second)}",
            "give one of each per example",
        )


def check_support(allowed: Tensor, values: Tensor, expected: str, remedy: str) -> None:
    """TargetError that names the first value outside the support."""
    if not allowed.all():
        wrong = (~allowed).nonzero()[0].tolist()
        place = wrong[0] if len(wrong) == 1 else tuple(wrong)
        raise TargetError(expected, f"{float(values[tuple(wrong)]):.6g} at {place}", remedy)


def read_number(value: Any, name: str) -> float:
    """A finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ArgumentError(f"a finite {name}", repr(value), "choose a proper prior")
    return number


def read_positive(value: Any, name: str) -> float:
    """A positive finite number."""
    number = read_number(value, name)
    if not number > 0:
        raise ArgumentError(f"a positive {name}", repr(value), "choose a proper prior")
    return number


def read_vector(values: Any, name: str) -> Tensor:
    """A finite vector of at least one entry; one number is a vector of one."""
    array = read_array(values, name)
    array = array[None] if array.dim() == 0 else array
    if array.dim() != 1 or len(array) == 0:
        raise ArgumentError(f"{name} as a vector", f"shape {tuple(array.shape)}", "pass a list")
    return array


def read_covariance(values: Any, name: str, size: int) -> Tensor:
    """A symmetric positive definite matrix [size, size]; a number stands for its multiple of 1."""
    array = read_array(values, name)
    if array.dim() == 0:
        array = array * torch.eye(size, dtype=array.dtype)
    if array.shape != (size, size):
        raise ArgumentError(
            f"{name} of shape ({size}, {size})",
            f"shape {tuple(array.shape)}",
            "give one row a dimension",
        )
    symmetric = torch.allclose(array, array.mT, rtol=SYMMETRIC, atol=SYMMETRIC_NEAR_ZERO)
    if not symmetric or int(torch.linalg.cholesky_ex(array).info) != 0:
        raise ArgumentError(
            f"a symmetric positive definite {name}",
            "one that is not" + ("" if symmetric else " symmetric"),
            "use a covariance, such as numpy.cov(x.T) of more points than dimensions",
        )
    return 0.5 * (array + array.mT)
