r"""Rules of the layers whose weight is a matrix: linear, convolutions and their transpose.

With rows r_t [O] and columns c_t [I] at each of T positions the per-example gradient is
:math:`\sum_t r_t c_t'`. For a linear layer the columns are its inputs and the rows its output
gradients; a convolution is a linear layer on patches; in a transposed convolution the two
change places. One position and nothing else is a rank-one gradient, which never has to be built.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules import Bound, Call, Roles, Rule


class MatrixRule(Rule):
    """A weight that is a matrix [groups, O, I] acting at T positions."""

    def groups(self, call: Call) -> int:
        """Blocks of channels that do not mix."""
        return int(call.settings.get("groups", 1))

    @abstractmethod
    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        """c, [B, groups, T, I]."""

    @abstractmethod
    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        """r, [B, groups, T, O]."""

    def bias_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        """Gradient of the bias, [B, channels]."""
        return self.rows(call, output_gradient).sum(2).flatten(1)

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        result: Roles = {}
        if "weight" in call.shapes:
            rows = self.rows(call, output_gradient).flatten(0, 1)
            columns = self.columns(call, output_gradient).flatten(0, 1)
            product = torch.bmm(rows.mT, columns)
            result["weight"] = product.reshape(call.num_examples, *call.shapes["weight"])
        if "bias" in call.shapes:
            result["bias"] = self.bias_gradient(call, output_gradient)
        return result

    def matrix(self, call: Call, weight: Tensor) -> Tensor:
        """A per-example weight change as [B * groups, O, I]."""
        groups = self.groups(call)
        rows = call.shapes["weight"][0] // groups
        return weight.reshape(call.num_examples * groups, rows, -1)


class Linear(MatrixRule):
    """y = x W' + b, at any number of positions."""

    functions = (functional.linear,)

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        weight, bias = arguments["weight"], arguments.get("bias")
        if weight.dim() != 2:
            return None
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(arguments["input"], parameters, {})

    def _positions(self, call: Call, tensor: Tensor) -> Tensor:
        return tensor.reshape(call.num_examples, 1, -1, tensor.shape[-1])

    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._positions(call, call.input)

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._positions(call, output_gradient)

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        columns = self._positions(call, call.input)[:, 0]
        out: Tensor | None = None
        if "weight" in direction:
            out = torch.bmm(columns, direction["weight"].mT)
        if "bias" in direction:
            bias = direction["bias"][:, None, :]
            out = bias.expand(-1, columns.shape[1], -1) if out is None else out + bias
        assert out is not None
        return out.reshape(*call.input.shape[:-1], out.shape[-1])


def _tuple(value: int | tuple[int, ...] | list[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


def _padding(settings: Mapping[str, Any], kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    padding, dilation = settings["padding"], settings["dilation"]
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in padding]


def padded(input: Tensor, kernel: tuple[int, ...], settings: Mapping[str, Any]) -> Tensor:
    """The input with the border of zeros that a convolution sees."""
    pads = _padding(settings, kernel)
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


class Convolution(MatrixRule):
    """A linear layer on the patches of its input; stride, padding, dilation and groups."""

    functions = (torch.conv1d, torch.conv2d, torch.conv3d)

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        weight, bias = arguments["weight"], arguments.get("bias")
        dims = weight.dim() - 2
        if arguments["input"].dim() != weight.dim():
            return None
        padding = arguments.get("padding", 0)
        settings = {
            "stride": _tuple(arguments.get("stride", 1), dims),
            "padding": padding if isinstance(padding, str) else _tuple(padding, dims),
            "dilation": _tuple(arguments.get("dilation", 1), dims),
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
                _padding(settings, kernel),
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


class TransposedConvolution(MatrixRule):
    """conv_transpose2d: the input gives the rows, patches of the output gradient the columns."""

    functions = (torch.conv_transpose2d,)

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        weight, bias = arguments["weight"], arguments.get("bias")
        if arguments["input"].dim() != 4:
            return None
        settings = {
            "stride": _tuple(arguments.get("stride", 1), 2),
            "padding": _tuple(arguments.get("padding", 0), 2),
            "output_padding": _tuple(arguments.get("output_padding", 0), 2),
            "dilation": _tuple(arguments.get("dilation", 1), 2),
            "groups": arguments.get("groups", 1),
            "kernel": tuple(weight.shape[2:]),
            "output_channels": weight.shape[1] * arguments.get("groups", 1),
        }
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(arguments["input"], parameters, settings)

    def _split(self, call: Call, tensor: Tensor, positions: int) -> Tensor:
        """[B * m, groups * C, T] -> [B, groups, m * T, C]."""
        groups, m = self.groups(call), call.multiplicity
        shaped = tensor.reshape(call.num_examples, m, groups, -1, positions)
        return shaped.permute(0, 2, 1, 4, 3).flatten(2, 3)

    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        unfolded = patches(output_gradient, call.settings["kernel"], call.settings)
        height, width = call.input.shape[2:]
        # output_padding adds border that may hold a further, unused position
        unfolded = unfolded[..., :height, :width].reshape(call.input.shape[0], -1, height * width)
        return self._split(call, unfolded, height * width)

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._split(call, call.input.flatten(2), math.prod(call.input.shape[2:]))

    def bias_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        shaped = output_gradient.unflatten(0, (call.num_examples, call.multiplicity))
        return shaped.sum((1, 3, 4))

    def _output_shape(self, call: Call) -> list[int]:
        s = call.settings
        return [
            (size - 1) * stride - 2 * padding + dilation * (k - 1) + extra + 1
            for size, stride, padding, dilation, k, extra in zip(
                call.input.shape[2:],
                s["stride"],
                s["padding"],
                s["dilation"],
                s["kernel"],
                s["output_padding"],
                strict=True,
            )
        ]

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        spatial = self._output_shape(call)
        channels = call.settings["output_channels"]
        out = call.input.new_zeros(call.input.shape[0], channels, *spatial)
        if "weight" in direction:
            rows = self.rows(call, out).flatten(0, 1)
            product = torch.bmm(rows, self.matrix(call, direction["weight"]))
            out = out + self._fold(call, product, spatial)
        if "bias" in direction:
            out = out + direction["bias"].repeat_interleave(call.multiplicity, 0)[:, :, None, None]
        return out

    def _fold(self, call: Call, product: Tensor, spatial: list[int]) -> Tensor:
        """[B * groups, m * T, C * kernel] -> [B * m, groups * C, *spatial]."""
        groups, m = self.groups(call), call.multiplicity
        shaped = product.reshape(call.num_examples, groups, m, -1, product.shape[-1])
        columns = shaped.permute(0, 2, 1, 4, 3).reshape(call.num_examples * m, -1, shaped.shape[3])
        s = call.settings
        return functional.fold(
            columns,
            tuple(spatial),
            s["kernel"],
            dilation=s["dilation"],
            padding=s["padding"],
            stride=s["stride"],
        )
