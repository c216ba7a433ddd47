"""Convolutions: linear layers on the patches of their input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from engram.engine.rules.base import (
    CHUNK_BYTES,
    Bound,
    Call,
    Roles,
    Signatures,
    register,
)
from engram.engine.rules.matrix import MatrixRule
from engram.engine.rules.patches import (
    borders,
    has_row_products,
    has_shifted_rows,
    patch_squares,
    patches,
    per_dimension,
    shifted_perturbation,
)
from engram.linalg.block import GradientSum, MatrixBlock
from engram.linalg.kronecker_factors import Factors


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
        options = {
            "stride": per_dimension(arguments.get("stride", 1), dims),
            "padding": padding if isinstance(padding, str) else per_dimension(padding, dims),
            "dilation": per_dimension(arguments.get("dilation", 1), dims),
            "groups": arguments.get("groups", 1),
            "kernel": tuple(weight.shape[2:]),
        }
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(arguments["input"], parameters, options)

    def _fields(self, call: Call) -> Tensor:
        """Patches as [B * groups, I, T]."""

        def make() -> Tensor:
            groups, kernel = self.groups(call), call.options["kernel"]
            unfolded = patches(call.input, kernel, call.options)
            channels = call.input.shape[1] // groups * math.prod(kernel)
            fields = unfolded.reshape(call.num_examples, call.multiplicity, groups, channels, -1)
            if call.multiplicity == 1:
                return fields.reshape(call.num_examples * groups, channels, -1)
            return fields.permute(0, 2, 3, 1, 4).reshape(call.num_examples * groups, channels, -1)

        return call.keep("fields", make)

    def input_columns(self, call: Call) -> Tensor:
        return self._fields(call).mT.unflatten(0, (call.num_examples, self.groups(call)))

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        groups = self.groups(call)
        channels = output_gradient.shape[1] // groups
        shaped = output_gradient.reshape(call.num_examples, call.multiplicity, groups, channels, -1)
        if call.multiplicity == 1:
            return shaped[:, 0].mT
        return shaped.permute(0, 2, 1, 4, 3).flatten(2, 3)

    def has_one_position(self, call: Call) -> bool:
        kernel, padding = call.options["kernel"], call.options["padding"]
        whole = tuple(call.input.shape[2:]) == kernel and padding in ("valid", (0,) * len(kernel))
        return whole and call.multiplicity == 1

    def in_output_shape(self, call: Call, by_position: Tensor, shape: torch.Size) -> Tensor:
        return by_position.unflatten(1, (call.multiplicity, -1)).mT.reshape(shape)

    def add_inputs(self, call: Call, factors: Factors) -> None:
        if has_row_products(call):
            factors.add_column_square(*patch_squares(call))
            return
        size = max(1, CHUNK_BYTES // max(self.bytes_per_example(call), 1))
        for start in range(0, call.num_examples, size):
            part = call.narrow(start, min(start + size, call.num_examples))
            factors.add_columns(self.input_columns(part))

    def perturbation(
        self,
        call: Call,
        output_gradient: Tensor,
        names: Mapping[str, str],
        blocks: Sequence[MatrixBlock],
        total: GradientSum,
    ) -> Tensor | None:
        """By shifted rows in place of patches, where the blocks are diagonal."""
        own = sorted(name for block in blocks for name in block.names) == sorted(names.values())
        if not own or "weight" not in names or not has_shifted_rows(call):
            return None
        covariance: Roles = {}
        for block in blocks:
            entrywise = block.entrywise_covariance()
            if entrywise is None:
                return None
            covariance |= entrywise
        by_role = {role: covariance[name] for role, name in names.items()}
        moved, summed = shifted_perturbation(call, output_gradient, by_role, total.wanted)
        for role, value in summed.items():
            total.add(names[role], value)
        return moved

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
        options, kernel = call.options, call.options["kernel"]
        return [
            (size + sum(pad) - dilation * (k - 1) - 1) // stride + 1
            for size, pad, dilation, k, stride in zip(
                call.input.shape[2:],
                borders(options, kernel),
                options["dilation"],
                kernel,
                options["stride"],
                strict=True,
            )
        ]

    def bytes_per_example(self, call: Call) -> int:
        fields = math.prod(self._output_shape(call)) * call.multiplicity
        fields *= call.input.shape[1] * math.prod(call.options["kernel"])
        return super().bytes_per_example(call) + fields * call.input.element_size()

    def cheaper_call(self, bound: Bound) -> Tensor | None:
        weight, bias = bound.parameters["weight"], bound.parameters.get("bias")
        return convolve(bound.input, weight, bias, bound.options)


def convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]
) -> Tensor | None:
    """A convolution with a constant weight, linear in its input to every order.

    The library's own second derivative of a convolution always computes the part that belongs to
    the weight as well, which costs more than the rest of it. Here the weight is a constant: the
    derivative of the convolution is its transpose, and the derivative of that the convolution
    again. None for paddings given by name.
    """
    if isinstance(options["padding"], str):
        return None
    geometry = tuple(options[k] for k in ("stride", "padding", "dilation", "groups"))
    constant = None if bias is None else bias.detach()
    result: Tensor = _Convolve.apply(  # type: ignore[no-untyped-call]
        input, weight.detach(), constant, geometry
    )
    return result


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.shape = geometry, input.shape
        return _convolution(input, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        moved = _Transpose.apply(  # type: ignore[no-untyped-call]
            gradients[0], weight, ctx.geometry, ctx.shape
        )
        return moved, None, None, None


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, weight: Tensor, geometry: tuple[Any, ...], shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = geometry
        like = gradient.new_empty(shape)  # only its shape is read; a view would be copied
        stride, padding, dilation, groups = geometry
        parts = torch.ops.aten.convolution_backward(
            gradient, like, weight, None, stride, padding, dilation, False,
            [0] * len(stride), groups, (True, False, False),
        )  # fmt: skip
        result: Tensor = parts[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return _convolution(gradients[0], weight, None, ctx.geometry), None, None, None


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]
) -> Tensor:
    stride, padding, dilation, groups = geometry
    zeros = [0] * len(stride)
    return torch.convolution(input, weight, bias, stride, padding, dilation, False, zeros, groups)
