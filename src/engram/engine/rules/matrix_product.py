"""Products with a weight as users write them: ``x @ W``, and ``addmm`` as GPT-2 has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engram.engine.rules.base import (
    CHUNK_BYTES,
    Bound,
    Call,
    Roles,
    Signatures,
    register,
)
from engram.engine.rules.matrix import ProductRule
from engram.linalg.block import GradientSum, MatrixBlock
from engram.linalg.kronecker_factors import Factors

MATMUL = ("input", "other")


@register
class MatrixProduct(ProductRule):
    """y = x W + b at any number of positions: inputs give the rows, output gradients the columns.

    The weight lies the other way round than that of a linear layer, [I, O].
    """

    counts_positions: ClassVar[bool] = True
    signatures: ClassVar[Signatures] = {
        torch.addmm: ("input", "mat1", "mat2"),  # the first one is the bias
        torch.matmul: MATMUL,
        torch.Tensor.matmul: MATMUL,
        torch.Tensor.__matmul__: MATMUL,
    }
    kronecker_roles: ClassVar[tuple[str, ...]] = ("weight",)

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        added = arguments["function"] is torch.addmm
        names = ("mat1", "mat2", "input") if added else MATMUL
        data, weight, *rest = (arguments.get(name) for name in names)
        bias = rest[0] if rest else None
        if not isinstance(data, Tensor) or not isinstance(weight, nn.Parameter):
            return None
        scaled = any(arguments.get(name, 1) != 1 for name in ("alpha", "beta"))
        row = bias is None or bias.shape == weight.shape[1:]
        if weight.dim() != 2 or data.dim() < 2 or scaled or not row:
            return None
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(data, parameters, {})

    def _positions(self, call: Call, tensor: Tensor) -> Tensor:
        return tensor.reshape(call.num_examples, 1, -1, tensor.shape[-1])

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._positions(call, call.input)

    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._positions(call, output_gradient)

    def bias_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self._positions(call, output_gradient)[:, 0].sum(1)

    def add_inputs(self, call: Call, factors: Factors) -> None:
        rows = self._positions(call, call.input)
        factors.positions += rows.shape[0] * rows.shape[2]
        factors.rows.add(rows)

    def add_gradients(self, call: Call, output_gradient: Tensor, factors: Factors) -> None:
        factors.columns.add(self.columns(call, output_gradient))

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        rows = self._positions(call, call.input)[:, 0]
        out: Tensor | None = None
        if "weight" in direction:
            out = torch.bmm(rows, direction["weight"])
        if "bias" in direction:
            bias = direction["bias"][:, None, :]
            out = bias.expand(-1, rows.shape[1], -1) if out is None else out + bias
        assert out is not None
        return out.reshape(*call.input.shape[:-1], out.shape[-1])

    def perturbation(
        self,
        call: Call,
        output_gradient: Tensor,
        names: Mapping[str, str],
        blocks: Sequence[MatrixBlock],
        total: GradientSum,
    ) -> Tensor | None:
        """By positions in the eigenbasis of the weight's factors; that of the bias beside it."""
        block = next((b for b in blocks if b.names == (names.get("weight"),)), None)
        if block is None or not block.turns_positions or block.keeps_rows:
            return None
        rows, columns = (self._positions(call, t)[:, 0] for t in (call.input, output_gradient))
        size = max(1, CHUNK_BYTES // self.bytes_per_example(call))
        parts = zip(rows.split(size), columns.split(size), strict=True)
        found = torch.cat([block.transposed_perturbations(r, c, total) for r, c in parts])
        summed = columns.sum(1)
        for other in blocks:
            if other is block:
                continue
            if other.names != (names.get("bias"),):
                return None
            found = found + other.solve({names["bias"]: summed})[names["bias"]][:, None]
            total.add(names["bias"], summed.sum(0))
        return found.reshape(output_gradient.shape)
