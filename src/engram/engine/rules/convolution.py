"""Convolutions: linear layers on the patches of their input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import Bound, Call, Roles, Signatures, register
from engram.engine.rules.linear import MatrixRule


@register
class Convolution(MatrixRule):
    """A linear layer on the patches of its input; stride, padding, dilation and groups."""

    signatures: ClassVar[Signatures] = dict.fromkeys(
        (torch.conv1d, torch.conv2d, torch.conv3d),
        ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    )

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        weight, bias = arguments["weight"], arguments.get("bias")
        dims = weight.dim() - 2
        if arguments["input"].dim() != weight.dim():
            return None
        padding = arguments.get("padding", 0)
        settings = {
            "stride": per_dimension(arguments.get("stride", 1), dims),
            "padding": padding if isinstance(padding, str) else per_dimension(padding, dims),
            "dilation": per_dimension(arguments.get("dilation", 1), dims),
            "groups": arguments.get("groups", 1),
            "kernel": tuple(weight.shape[2:]),
        }
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(arguments["input"], parameters, settings)

    def _fields(self, call: Call) -> Tensor:
        """Patches as [B * groups, I, T]."""

        def make() -> Tensor:
            groups, kernel = self.groups(call), call.settings["kernel"]
            unfolded = patches(call.input, kernel, call.settings)
            channels = call.input.shape[1] // groups * math.prod(kernel)
            fields = unfolded.reshape(call.num_examples, call.multiplicity, groups, channels, -1)
            if call.multiplicity == 1:
                return fields.reshape(call.num_examples * groups, channels, -1)
            return fields.permute(0, 2, 3, 1, 4).reshape(call.num_examples * groups, channels, -1)

        return call.keep("fields", make)

    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._fields(call).mT.unflatten(0, (call.num_examples, self.groups(call)))

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        groups = self.groups(call)
        channels = output_gradient.shape[1] // groups
        shaped = output_gradient.reshape(call.num_examples, call.multiplicity, groups, channels, -1)
        if call.multiplicity == 1:
            return shaped[:, 0].mT
        return shaped.permute(0, 2, 1, 4, 3).flatten(2, 3)

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        spatial = self._output_shape(call)
        out: Tensor | None = None
        if "weight" in direction:
            out = torch.bmm(self.matrix(call, direction["weight"]), self._fields(call))
            channels = call.shapes["weight"][0]
            out = out.reshape(call.num_examples, channels, call.multiplicity, -1)
            out = out.transpose(1, 2).reshape(-1, channels, *spatial)
        if "bias" in direction:
            bias = direction["bias"].repeat_interleave(call.multiplicity, 0)
            bias = bias.reshape(*bias.shape, *[1] * len(spatial))
            out = bias.expand(*bias.shape[:2], *spatial) if out is None else out + bias
        assert out is not None
        return out

    def _output_shape(self, call: Call) -> list[int]:
        settings, kernel = call.settings, call.settings["kernel"]
        return [
            (size + sum(pad) - dilation * (k - 1) - 1) // stride + 1
            for size, pad, dilation, k, stride in zip(
                call.input.shape[2:],
                _borders(settings, kernel),
                settings["dilation"],
                kernel,
                settings["stride"],
                strict=True,
            )
        ]

    def bytes_per_example(self, call: Call) -> int:
        fields = math.prod(self._output_shape(call)) * call.multiplicity
        fields *= call.input.shape[1] * math.prod(call.settings["kernel"])
        return super().bytes_per_example(call) + fields * call.input.element_size()

    def cheaper_call(self, bound: Bound) -> Tensor | None:
        weight, bias = bound.parameters["weight"], bound.parameters.get("bias")
        return convolve(bound.input, weight, bias, bound.settings)


def per_dimension(value: int | tuple[int, ...] | list[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


def _borders(settings: Mapping[str, Any], kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    padding, dilation = settings["padding"], settings["dilation"]
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in padding]


def padded(input: Tensor, kernel: tuple[int, ...], settings: Mapping[str, Any]) -> Tensor:
    """The input with the border of zeros that a convolution sees."""
    pads = _borders(settings, kernel)
    if not any(p for pad in pads for p in pad):
        return input
    return functional.pad(input, [p for pad in reversed(pads) for p in pad])


def patches(input: Tensor, kernel: tuple[int, ...], settings: Mapping[str, Any]) -> Tensor:
    """Receptive fields as [N, C, *kernel, *positions], copied from a strided view."""
    view = padded(input, kernel, settings)
    for axis, (size, stride, dilation) in enumerate(
        zip(kernel, settings["stride"], settings["dilation"], strict=True)
    ):
        view = view.unfold(axis + 2, dilation * (size - 1) + 1, stride)[..., ::dilation]
    dims = len(kernel)
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    return view.permute(order).contiguous()


def convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None, settings: Mapping[str, Any]
) -> Tensor | None:
    """A convolution with a constant weight, linear in its input to every order.

    The library's own second derivative of a convolution always computes the part that belongs to
    the weight as well, which costs more than the rest of it. Here the weight is a constant: the
    derivative of the convolution is its transpose, and the derivative of that the convolution
    again. None for paddings given by name.
    """
    if isinstance(settings["padding"], str):
        return None
    options = tuple(settings[k] for k in ("stride", "padding", "dilation", "groups"))
    constant = None if bias is None else bias.detach()
    result: Tensor = _Convolve.apply(  # type: ignore[no-untyped-call]
        input, weight.detach(), constant, options
    )
    return result


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
