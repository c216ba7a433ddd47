"""Transposed convolutions of images: input and output gradient have changed places."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import Bound, Call, Roles, Signatures, register
from engram.engine.rules.matrix import ProductRule
from engram.engine.rules.patches import patches, per_dimension
from engram.linalg.kronecker_factors import Factors


@register
class TransposedConvolution(ProductRule):
    """conv_transpose2d: the input gives the rows, patches of the output gradient the columns."""

    signatures: ClassVar[Signatures] = {
        torch.conv_transpose2d: (
            *("input", "weight", "bias", "stride"),
            *("padding", "output_padding", "groups", "dilation"),
        )
    }
    kronecker_roles: ClassVar[tuple[str, ...]] = ("weight",)

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        weight, bias = arguments["weight"], arguments.get("bias")
        if arguments["input"].dim() != 4:
            return None
        options = {
            "stride": per_dimension(arguments.get("stride", 1), 2),
            "padding": per_dimension(arguments.get("padding", 0), 2),
            "output_padding": per_dimension(arguments.get("output_padding", 0), 2),
            "dilation": per_dimension(arguments.get("dilation", 1), 2),
            "groups": arguments.get("groups", 1),
            "kernel": tuple(weight.shape[2:]),
            "output_channels": weight.shape[1] * arguments.get("groups", 1),
        }
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(arguments["input"], parameters, options)

    def _split(self, call: Call, tensor: Tensor, positions: int) -> Tensor:
        """[B * m, groups * C, T] -> [B, groups, m * T, C]."""
        groups, m = self.groups(call), call.multiplicity
        shaped = tensor.reshape(call.num_examples, m, groups, -1, positions)
        return shaped.permute(0, 2, 1, 4, 3).flatten(2, 3)

    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        unfolded = patches(output_gradient, call.options["kernel"], call.options)
        height, width = call.input.shape[2:]
        # output_padding adds border that may hold a further, unused position
        unfolded = unfolded[..., :height, :width].reshape(call.input.shape[0], -1, height * width)
        return self._split(call, unfolded, height * width)

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._input_rows(call)

    def _input_rows(self, call: Call) -> Tensor:
        return self._split(call, call.input.flatten(2), math.prod(call.input.shape[2:]))

    def add_inputs(self, call: Call, factors: Factors) -> None:
        rows = self._input_rows(call)
        factors.positions += rows.shape[0] * rows.shape[2]
        factors.rows.add(rows)

    def add_gradients(self, call: Call, output_gradient: Tensor, factors: Factors) -> None:
        factors.columns.add(self.columns(call, output_gradient))

    def bias_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        shaped = output_gradient.unflatten(0, (call.num_examples, call.multiplicity))
        return shaped.sum((1, 3, 4))

    def _output_shape(self, call: Call) -> list[int]:
        s = call.options
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
        channels = call.options["output_channels"]
        out = call.input.new_zeros(call.input.shape[0], channels, *spatial)
        if "weight" in direction:
            rows = self._input_rows(call).flatten(0, 1)
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
        s = call.options
        return functional.fold(
            columns,
            tuple(spatial),
            s["kernel"],
            dilation=s["dilation"],
            padding=s["padding"],
            stride=s["stride"],
        )
