"""Rules of embeddings and of scales and shifts after a normalisation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules import Bound, Call, Roles, Rule, repeat_positions, sum_positions


class AffineRule(Rule):
    """y = normalised(x) * weight + bias: what normalises has no parameters of its own."""

    @abstractmethod
    def normalised(self, call: Call) -> Tensor:
        """The input before scale and shift, in the input's shape."""

    @abstractmethod
    def reduce(self, call: Call, per_entry: Tensor) -> Tensor:
        """Sum an [N, ...] tensor of the input's shape over positions to [N, *weight shape]."""

    @abstractmethod
    def spread(self, call: Call, per_row: Tensor) -> Tensor:
        """[N, *weight shape] to a shape that broadcasts with the input."""

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        result: Roles = {}
        if "weight" in call.shapes:
            scaled = output_gradient * self.normalised(call)
            result["weight"] = sum_positions(call, self.reduce(call, scaled))
        if "bias" in call.shapes:
            result["bias"] = sum_positions(call, self.reduce(call, output_gradient))
        return result

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        out = torch.zeros_like(call.input)
        if "weight" in direction:
            weight = self.spread(call, repeat_positions(call, direction["weight"]))
            out = out + self.normalised(call) * weight
        if "bias" in direction:
            out = out + self.spread(call, repeat_positions(call, direction["bias"]))
        return out


def _affine(arguments: Mapping[str, Any], settings: dict[str, Any]) -> Bound | None:
    given = {role: arguments.get(role) for role in ("weight", "bias")}
    parameters = {role: tensor for role, tensor in given.items() if tensor is not None}
    return Bound(arguments["input"], parameters, settings) if parameters else None


class TrailingNorm(AffineRule):
    """LayerNorm and RMSNorm: the scale has the shape of the last dimensions."""

    functions = (functional.layer_norm, functional.rms_norm)

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        shape = arguments["normalized_shape"]
        return _affine(
            arguments,
            {
                "shape": tuple(shape),
                "eps": arguments.get("eps"),
                "function": arguments["function"],
            },
        )

    def normalised(self, call: Call) -> Tensor:
        def make() -> Tensor:
            s = call.settings
            if s["function"] is functional.rms_norm:
                return functional.rms_norm(call.input, s["shape"], eps=s["eps"])
            eps = 1e-5 if s["eps"] is None else s["eps"]
            return functional.layer_norm(call.input, s["shape"], eps=eps)

        return call.keep("normalised", make)

    def reduce(self, call: Call, per_entry: Tensor) -> Tensor:
        positions = tuple(range(1, per_entry.dim() - len(call.settings["shape"])))
        return per_entry.sum(positions) if positions else per_entry

    def spread(self, call: Call, per_row: Tensor) -> Tensor:
        shape = call.settings["shape"]
        ones = [1] * (call.input.dim() - 1 - len(shape))
        return per_row.reshape(per_row.shape[0], *ones, *shape)


class ChannelNorm(AffineRule):
    """GroupNorm, and BatchNorm with its running statistics: a scale per channel."""

    functions = (functional.group_norm, functional.batch_norm)

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        if arguments["function"] is functional.batch_norm:
            if arguments.get("training") or arguments.get("running_mean") is None:
                return None
            keep: tuple[str, ...] = ("running_mean", "running_var", "eps")
        else:
            keep = ("num_groups", "eps")
        settings = {k: arguments[k] for k in keep if k in arguments}
        return _affine(arguments, settings)

    def normalised(self, call: Call) -> Tensor:
        def make() -> Tensor:
            s = dict(call.settings)
            if "num_groups" in s:
                return functional.group_norm(call.input, **s)
            return functional.batch_norm(call.input, **s)

        return call.keep("normalised", make)

    def reduce(self, call: Call, per_entry: Tensor) -> Tensor:
        positions = tuple(range(2, per_entry.dim()))
        return per_entry.sum(positions) if positions else per_entry

    def spread(self, call: Call, per_row: Tensor) -> Tensor:
        return per_row.reshape(*per_row.shape, *[1] * (call.input.dim() - 2))


class Embedding(Rule):
    """Rows of a table picked by token: the gradient touches only the rows that were picked."""

    functions = (functional.embedding,)

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
