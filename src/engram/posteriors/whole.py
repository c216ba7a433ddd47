"""What a posterior from a file must be before anything is solved with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engram.core.errors import StorageError
from engram.core.parameters import Layout
from engram.linalg.blocks import Block, EigenBlock
from engram.linalg.low_rank import LowRankBlock


def check_mean(mean: Mapping[str, Tensor]) -> None:
    """StorageError unless there are parameters, all finite."""
    _check(len(mean) > 0, "a mean with parameters", "none")
    for name, value in mean.items():
        _check_numbers(f"the mean of {name!r}", value)


def check_blocks(blocks: Sequence[Block], mean: Mapping[str, Tensor]) -> None:
    """StorageError unless the blocks are finite and fit the mean's parameters."""
    _check(len(blocks) > 0, "a precision with blocks", "none")
    seen: set[str] = set()
    for number, block in enumerate(blocks):
        layout = block.layout
        same = len(layout.names) == len(layout.shapes) > 0
        _check(same, f"names and shapes in block {number}", repr(layout)[:80])
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            _check(name in mean, f"parameters of the mean in block {number}", repr(name))
            _check(name not in seen, "every parameter in one block", f"{name!r} in two")
            wanted = list(mean[name].shape)
            _check(list(shape) == wanted, f"the shape {wanted} of {name!r}", f"{list(shape)}")
            seen.add(name)
        if isinstance(block, EigenBlock):
            _check_eigen(block, number)
        elif isinstance(block, LowRankBlock):
            _check_low_rank(block, number)
        else:
            _check_factor(block.cholesky, layout, number)


def _check_eigen(block: EigenBlock, number: int) -> None:
    layout, shape = block.layout, block.precision.shape
    _check_numbers(f"the precision of block {number}", block.precision)
    _check_numbers(f"the inverse precision of block {number}", block.covariance)
    _check(len(shape) == 3, f"a precision [G, O, I] in block {number}", f"{list(shape)}")
    groups, rows, columns = shape
    sizes = (groups * rows * (columns - len(layout.names) + 1), groups * rows)
    fits = layout.sizes == sizes[: len(layout.names)]
    _check(fits, f"a precision for {', '.join(layout.names)}", f"shape {list(shape)}")
    wanted = {"rows": (groups, rows, rows), "columns": (groups, columns, columns)}
    for name, size in (wanted | {"row_share": (rows,)}).items():
        part = getattr(block, name)
        if part is not None:
            _check_numbers(f"{name} of block {number}", part, size)
    possible = 0 <= block.tolerance < math.inf
    _check(possible, f"a tolerance in block {number}", f"{block.tolerance}")


def _check_low_rank(block: LowRankBlock, number: int) -> None:
    size = block.layout.num_params
    _check(block.inside.dim() == 1, f"inside [r] in block {number}", f"{list(block.inside.shape)}")
    _check_numbers(f"inside of block {number}", block.inside)
    _check(0 < block.rest < math.inf, f"a finite rest in block {number}", f"{block.rest}")
    rank = len(block.inside)
    for name in ("basis", "outside"):
        _check_numbers(f"{name} of block {number}", getattr(block, name), (size, rank))


def _check_factor(factor: Tensor, layout: Layout, number: int) -> None:
    size = layout.num_params
    _check_numbers(f"the factor of block {number}", factor, (size, size))
    positive = bool((factor.diagonal() > 0).all()) and bool((factor.triu(1) == 0).all())
    _check(positive, f"a lower factor with a positive diagonal in block {number}", "another one")


def _check_numbers(what: str, value: Tensor, shape: tuple[int, ...] | None = None) -> None:
    _check(value.is_floating_point(), f"numbers as {what}", f"{value.dtype}")
    right = shape is None or tuple(value.shape) == shape
    _check(right, f"{what} of shape {shape}", f"{tuple(value.shape)}")
    _check(bool(torch.isfinite(value).all()), f"{what} to be finite", "NaN or infinity")


def _check(good: bool, expected: str, got: str) -> None:
    if not good:
        raise StorageError(expected, got, "fit the posterior again, and save it again")
