"""Normalisations: scales and shifts after what has no parameters of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import (
    Bound,
    Call,
    Roles,
    Rule,
    Signatures,
    register,
    repeat_positions,
    sum_positions,
)

TORCH_EPS = 1e-5  # what torch adds to a variance in layer_norm, where the call names none


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


def _affine(arguments: Mapping[str, Any], options: dict[str, Any]) -> Bound | None:
    given = {role: arguments.get(role) for role in ("weight", "bias")}
    parameters = {role: tensor for role, tensor in given.items() if tensor is not None}
    return Bound(arguments["input"], parameters, options) if parameters else None


@register
class TrailingNorm(AffineRule):
    """LayerNorm and RMSNorm: the scale has the shape of the last dimensions."""

    signatures: ClassVar[Signatures] = {
        functional.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
        functional.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    }

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
            s = call.options
            if s["function"] is functional.rms_norm:
                return functional.rms_norm(call.input, s["shape"], eps=s["eps"])
            eps = TORCH_EPS if s["eps"] is None else s["eps"]
            return functional.layer_norm(call.input, s["shape"], eps=eps)

        return call.keep("normalised", make)

    def reduce(self, call: Call, per_entry: Tensor) -> Tensor:
        positions = tuple(range(1, per_entry.dim() - len(call.options["shape"])))
        return per_entry.sum(positions) if positions else per_entry

    def spread(self, call: Call, per_row: Tensor) -> Tensor:
        shape = call.options["shape"]
        ones = [1] * (call.input.dim() - 1 - len(shape))
        return per_row.reshape(per_row.shape[0], *ones, *shape)


@register
class ChannelNorm(AffineRule):
    """GroupNorm, and BatchNorm with its running statistics: a scale per channel."""

    signatures: ClassVar[Signatures] = {
        functional.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
        functional.batch_norm: (
            *("input", "running_mean", "running_var", "weight"),
            *("bias", "training", "momentum", "eps"),
        ),
    }

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        if arguments["function"] is functional.batch_norm:
            if arguments.get("training") or arguments.get("running_mean") is None:
                return None
            keep: tuple[str, ...] = ("running_mean", "running_var", "eps")
        else:
            keep = ("num_groups", "eps")
        options = {k: arguments[k] for k in keep if k in arguments}
        return _affine(arguments, options)

    def normalised(self, call: Call) -> Tensor:
        def make() -> Tensor:
            s = dict(call.options)
            if "num_groups" in s:
                return functional.group_norm(call.input, **s)
            return functional.batch_norm(call.input, **s)

        return call.keep("normalised", make)

    def reduce(self, call: Call, per_entry: Tensor) -> Tensor:
        positions = tuple(range(2, per_entry.dim()))
        return per_entry.sum(positions) if positions else per_entry

    def spread(self, call: Call, per_row: Tensor) -> Tensor:
        return per_row.reshape(*per_row.shape, *[1] * (call.input.dim() - 2))
