"""Embeddings: rows of a table picked by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import (
    CHUNK_BYTES,
    Bound,
    Call,
    Roles,
    Rule,
    Signatures,
    register,
)
from engram.linalg.block import GradientSum, MatrixBlock
from engram.linalg.kronecker_factors import Factors


@register
class Embedding(Rule):
    """Rows of a table picked by token: the gradient uses only the rows that were picked."""

    counts_positions: ClassVar[bool] = True
    signatures: ClassVar[Signatures] = {
        functional.embedding: (
            *("input", "weight", "padding_idx", "max_norm"),
            *("norm_type", "scale_grad_by_freq", "sparse"),
        )
    }
    kronecker_roles: ClassVar[tuple[str, ...]] = ("weight",)
    takes_leading: ClassVar[bool] = True

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        if arguments.get("max_norm") is not None or arguments.get("scale_grad_by_freq"):
            return None
        options = {"padding_idx": arguments.get("padding_idx")}
        return Bound(arguments["input"], {"weight": arguments["weight"]}, options)

    def tokens(self, call: Call) -> Tensor:
        """Token numbers, [B, T]."""
        return call.input.reshape(call.num_examples, -1)

    def picked_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        """Gradient at each position, [B, T, D]; none where the token is padding."""
        width = output_gradient.shape[-1]
        gradient = output_gradient.reshape(call.num_examples, -1, width)
        padding = self.padding(call)
        if padding is None:
            return gradient
        return gradient * (self.tokens(call) != padding)[:, :, None]

    def padding(self, call: Call) -> int | None:
        """The token whose row gets no gradient; negative numbers count from the end."""
        padding = call.options["padding_idx"]
        if padding is not None and padding < 0:
            padding += call.shapes["weight"][0]
        return None if padding is None else int(padding)

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        picked = self.picked_gradient(call, output_gradient)
        table = picked.new_zeros(call.num_examples, *call.shapes["weight"])
        index = self.tokens(call)[:, :, None].expand_as(picked)
        return {"weight": table.scatter_add_(1, index, picked)}

    def summed_gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        picked = self.picked_gradient(call, output_gradient).flatten(0, 1)
        table = picked.new_zeros(call.shapes["weight"])
        return {"weight": table.index_add_(0, self.tokens(call).flatten(), picked)}

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        table = direction["weight"]
        tokens = self.tokens(call)
        index = tokens[:, :, None].expand(-1, -1, table.shape[-1])
        picked = table.gather(1, index)
        padding = self.padding(call)
        if padding is not None:
            picked = picked * (tokens != padding)[:, :, None]
        return picked.reshape(*call.input.shape, table.shape[-1])

    def add_inputs(self, call: Call, factors: Factors) -> None:
        """How often each token was seen stands for the products of its row."""
        tokens = self.tokens(call).flatten()
        padding = self.padding(call)
        num_positions = tokens.numel()
        if padding is not None:
            tokens = tokens[tokens != padding]
        counts = torch.bincount(tokens, minlength=call.shapes["weight"][0])
        factors.add_counts(counts, num_positions)

    def add_gradients(self, call: Call, output_gradient: Tensor, factors: Factors) -> None:
        picked = self.picked_gradient(call, output_gradient).flatten(0, 1)
        factors.columns.add(picked[:, None, None])

    def perturbation(
        self,
        call: Call,
        output_gradient: Tensor,
        names: Mapping[str, str],
        blocks: Sequence[MatrixBlock],
        total: GradientSum,
    ) -> Tensor | None:
        """An example's gradient is in the rows of its tokens alone."""
        if len(blocks) != 1 or not blocks[0].keeps_rows:
            return None
        tokens = self.tokens(call)
        if total.wanted:
            total.add(names["weight"], self.summed_gradient(call, output_gradient)["weight"])
        summed = self.summed_by_row(call, output_gradient)
        return blocks[0].solve_rows(tokens, summed).reshape(output_gradient.shape)

    def picked_rows(self, call: Call) -> Tensor:
        return self.tokens(call)

    def summed_by_row(self, call: Call, output_gradient: Tensor) -> Tensor:
        """At each position the gradient of its token's row, all its positions added, [B, T, D]."""
        tokens, picked = self.tokens(call), self.picked_gradient(call, output_gradient)
        size = max(1, CHUNK_BYTES // (picked.element_size() * tokens.shape[1] ** 2))
        return torch.cat(
            [
                (some[:, :, None] == some[:, None, :]).to(picked.dtype) @ part
                for some, part in zip(tokens.split(size), picked.split(size), strict=True)
            ]
        )
