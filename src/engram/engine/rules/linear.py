"""Linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import Bound, Call, Roles, Signatures, register
from engram.engine.rules.matrix import MatrixRule


@register
class Linear(MatrixRule):
    """y = x W' + b, at any number of positions."""

    counts_positions: ClassVar[bool] = True
    signatures: ClassVar[Signatures] = {functional.linear: ("input", "weight", "bias")}
    takes_leading: ClassVar[bool] = True

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        weight, bias = arguments["weight"], arguments.get("bias")
        if weight.dim() != 2:
            return None
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(arguments["input"], parameters, {})

    def _positions(self, call: Call, tensor: Tensor) -> Tensor:
        return tensor.reshape(call.num_examples, 1, -1, tensor.shape[-1])

    def input_columns(self, call: Call) -> Tensor:
        return self._positions(call, call.input)

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._positions(call, output_gradient)

    def has_one_position(self, call: Call) -> bool:
        return call.input.numel() // (call.input.shape[-1] * max(call.num_examples, 1)) == 1

    def summed_gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        rows = output_gradient.reshape(-1, output_gradient.shape[-1])
        result: Roles = {}
        if "weight" in call.shapes:
            result["weight"] = rows.mT @ call.input.reshape(-1, call.input.shape[-1])
        if "bias" in call.shapes:
            result["bias"] = rows.sum(0)
        return result

    def in_output_shape(self, call: Call, by_position: Tensor, shape: torch.Size) -> Tensor:
        return by_position.reshape(shape)

    def together(self, calls: Sequence[Call]) -> Call | None:
        if any(call.multiplicity != 1 or call.shapes != calls[0].shapes for call in calls):
            return None
        columns = torch.cat([self._positions(call, call.input)[:, 0] for call in calls], dim=1)
        return Call(columns, calls[0].shapes, calls[0].options)

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
