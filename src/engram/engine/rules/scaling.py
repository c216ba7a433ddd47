"""Scales as users write them: ``weight * x``, as in the RMS norms of Llama and T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

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

FACTORS = ("input", "other")


@register
class Scaling(Rule):
    """y = w * x, with a parameter that has the shape of x's last dimensions, from either side."""

    signatures: ClassVar[Signatures] = {torch.mul: FACTORS, torch.Tensor.mul: FACTORS}

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        data, weight = (arguments.get(name) for name in FACTORS)
        if isinstance(data, nn.Parameter):
            data, weight = weight, data
        if not isinstance(weight, nn.Parameter) or not isinstance(data, Tensor):
            return None
        shape = weight.shape
        trails = 0 < len(shape) < data.dim() and data.shape[data.dim() - len(shape) :] == shape
        return Bound(data, {"weight": weight}, {}) if trails else None

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        scaled = output_gradient * call.input
        positions = tuple(range(1, scaled.dim() - len(call.shapes["weight"])))
        summed = scaled.sum(positions) if positions else scaled
        return {"weight": sum_positions(call, summed)}

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        own = repeat_positions(call, direction["weight"])
        between = [1] * (call.input.dim() - own.dim())
        return call.input * own.reshape(len(own), *between, *own.shape[1:])
