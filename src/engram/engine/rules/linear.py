r"""Linear layers, and what every layer whose weight is a matrix has in common.

With rows r_t [O] and columns c_t [I] at each of T positions the per-example gradient is
:math:`\sum_t r_t c_t'`. For a linear layer the columns are its inputs and the rows its output
gradients; a convolution is a linear layer on patches; in a transposed convolution the two
change places. One position and nothing else is a rank-one gradient, which never has to be built.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import Bound, Call, Roles, Rule, Signatures, register


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


@register
class Linear(MatrixRule):
    """y = x W' + b, at any number of positions."""

    signatures: ClassVar[Signatures] = {functional.linear: ("input", "weight", "bias")}

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
