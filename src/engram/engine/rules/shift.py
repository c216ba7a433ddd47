"""Shifts as users write them: ``x + p``, as the learned positions of vision transformers."""

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

TERMS = ("input", "other")


@register
class Shift(Rule):
    """y = x + p, with a parameter of x's last dimensions, ones in front of them or not."""

    signatures: ClassVar[Signatures] = {torch.add: TERMS, torch.Tensor.add: TERMS}

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        data, shift = (arguments.get(name) for name in TERMS)
        if isinstance(data, nn.Parameter):
            data, shift = shift, data
        if not isinstance(shift, nn.Parameter) or not isinstance(data, Tensor):
            return None
        width = _width(shift.shape)
        fits = shift.dim() <= data.dim() and width < data.dim()
        matches = data.shape[data.dim() - width :] == shift.shape[shift.dim() - width :]
        if not fits or not matches or arguments.get("alpha", 1) != 1:
            return None
        return Bound(data, {"shift": shift}, {})

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        shape = call.shapes["shift"]
        positions = tuple(range(1, output_gradient.dim() - _width(shape)))
        summed = output_gradient.sum(positions) if positions else output_gradient
        return {"shift": sum_positions(call, summed).reshape(call.num_examples, *shape)}

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        own = repeat_positions(call, direction["shift"])
        shape = own.shape[own.dim() - _width(call.shapes["shift"]) :]
        between = [1] * (call.input.dim() - 1 - len(shape))
        return own.reshape(len(own), *between, *shape).expand(call.input.shape)


def _width(shape: torch.Size) -> int:
    """How many dimensions are left without the ones in front."""
    return next((len(shape) - i for i, size in enumerate(shape) if size != 1), 0)
