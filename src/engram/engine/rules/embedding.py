"""Embeddings: rows of a table picked by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import Bound, Call, Roles, Rule, Signatures, register


@register
class Embedding(Rule):
    """Rows of a table picked by token: the gradient uses only the rows that were picked."""

    signatures: ClassVar[Signatures] = {
        functional.embedding: (
            *("input", "weight", "padding_idx", "max_norm"),
            *("norm_type", "scale_grad_by_freq", "sparse"),
        )
    }

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        if arguments.get("max_norm") is not None or arguments.get("scale_grad_by_freq"):
            return None
        settings = {"padding_idx": arguments.get("padding_idx")}
        return Bound(arguments["input"], {"weight": arguments["weight"]}, settings)

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
        padding = call.settings["padding_idx"]
        if padding is not None and padding < 0:
            padding += call.shapes["weight"][0]
        return None if padding is None else int(padding)

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        picked = self.picked_gradient(call, output_gradient)
        table = picked.new_zeros(call.num_examples, *call.shapes["weight"])
        index = self.tokens(call)[:, :, None].expand_as(picked)
        return {"weight": table.scatter_add_(1, index, picked)}

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        table = direction["weight"]
        tokens = self.tokens(call)
        index = tokens[:, :, None].expand(-1, -1, table.shape[-1])
        picked = table.gather(1, index)
        padding = self.padding(call)
        if padding is not None:
            picked = picked * (tokens != padding)[:, :, None]
        return picked.reshape(*call.input.shape, table.shape[-1])
