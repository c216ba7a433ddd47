"""What a posterior from a file must be before anything is solved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from engram.linalg.block import Block, check_numbers, check_that


def check_mean(mean: Mapping[str, Tensor]) -> None:
    """StorageError unless there are parameters, all finite."""
    check_that(len(mean) > 0, "a mean with parameters", "none")
    for name, value in mean.items():
        check_numbers(f"the mean of {name!r}", value)


def check_blocks(blocks: Sequence[Block], mean: Mapping[str, Tensor]) -> None:
    """StorageError unless the blocks are finite and fit the mean's parameters."""
    check_that(len(blocks) > 0, "a precision with blocks", "none")
    seen: set[str] = set()
    for number, block in enumerate(blocks):
        layout = block.layout
        same = len(layout.names) == len(layout.shapes) > 0
        check_that(same, f"names and shapes in block {number}", repr(layout)[:80])
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            check_that(name in mean, f"parameters of the mean in block {number}", repr(name))
            check_that(name not in seen, "every parameter in one block", f"{name!r} in two")
            wanted = list(mean[name].shape)
            check_that(list(shape) == wanted, f"the shape {wanted} of {name!r}", f"{list(shape)}")
            seen.add(name)
        block.check(f"block {number}")
