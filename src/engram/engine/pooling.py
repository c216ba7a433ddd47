"""Averages over windows that tile an image, by adding slices.

The library's kernel visits each window by itself; for windows without overlap adding every second
row, then every second column, moves the same numbers several times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Window = tuple[int, int]


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, window: Window, divisor: int) -> Tensor:
        ctx.window, ctx.divisor = window, divisor
        height, width = window
        rows = _added([input[..., first::height, :] for first in range(height)])
        return _added([rows[..., first::width] for first in range(width)]).div_(divisor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        spread = _Spread.apply(  # type: ignore[no-untyped-call]
            gradients[0], ctx.window, ctx.divisor
        )
        return spread, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, window: Window, divisor: int) -> Tensor:
        ctx.window, ctx.divisor = window, divisor
        height, width = window
        *lead, rows, columns = gradient.shape
        result = gradient.new_empty(*lead, rows * height, columns * width)
        share = gradient / divisor
        for first in range(height):
            for second in range(width):
                result[..., first::height, second::width] = share
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        average = _Average.apply(  # type: ignore[no-untyped-call]
            gradients[0], ctx.window, ctx.divisor
        )
        return average, None, None


def average_pool(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    """What ``avg_pool2d`` gives, or None where its windows do not tile the image.

    Where they do, there is no border to be counted and nothing to be rounded up.
    """
    height, width = _pair(kernel_size)
    tiles = stride in (None, ()) or _pair(stride) == (height, width)
    if not tiles or _pair(padding) != (0, 0) or input.dim() < 3:
        return None
    if input.shape[-2] % height or input.shape[-1] % width:
        return None
    result: Tensor = _Average.apply(  # type: ignore[no-untyped-call]
        input, (height, width), divisor_override or height * width
    )
    return result


def _pair(value: int | Sequence[int] | None) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    assert value is not None
    return (value[0], value[-1])


def _added(slices: Sequence[Tensor]) -> Tensor:
    """A new tensor; a copy where there is nothing to add."""
    if len(slices) == 1:
        return slices[0].clone()
    total = slices[0] + slices[1]
    for part in slices[2:]:
        total += part
    return total
