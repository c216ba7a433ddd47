"""A convolution with a constant weight, linear in its input to every order.

The library's own second derivative of a convolution always computes the part that belongs to the
weight as well, which costs more than the rest of it. Here the weight is a constant: the derivative
of the convolution is its transpose, and the derivative of that the convolution again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.options, ctx.shape = options, input.shape
        return _convolution(input, weight, bias, options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        moved = _Transpose.apply(  # type: ignore[no-untyped-call]
            gradients[0], weight, ctx.options, ctx.shape
        )
        return moved, None, None, None


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, weight: Tensor, options: tuple[Any, ...], shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.options = options
        like = gradient.new_empty(shape)  # only its shape is read; a view would be copied
        stride, padding, dilation, groups = options
        parts = torch.ops.aten.convolution_backward(
            gradient, like, weight, None, stride, padding, dilation, False,
            [0] * len(stride), groups, (True, False, False),
        )  # fmt: skip
        result: Tensor = parts[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return _convolution(gradients[0], weight, None, ctx.options), None, None, None


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]
) -> Tensor:
    stride, padding, dilation, groups = options
    zeros = [0] * len(stride)
    return torch.convolution(input, weight, bias, stride, padding, dilation, False, zeros, groups)


def convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None, settings: Mapping[str, Any]
) -> Tensor | None:
    """The convolution as a linear function of its input; None for paddings given by name."""
    if isinstance(settings["padding"], str):
        return None
    options = tuple(settings[k] for k in ("stride", "padding", "dilation", "groups"))
    constant = None if bias is None else bias.detach()
    result: Tensor = _Convolve.apply(  # type: ignore[no-untyped-call]
        input, weight.detach(), constant, options
    )
    return result
