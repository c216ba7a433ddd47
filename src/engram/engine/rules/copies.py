"""Parameters laid out once per example: what any operation without a rule can be run with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from engram.engine.rules.base import Bound, Call, Roles, Rule, Signatures


class Copies(Rule):
    """A parameter given to each example as a copy of its own: both maps are the identity."""

    signatures: ClassVar[Signatures] = {}  # of no operation by itself

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        return None

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        shape = call.shapes["value"]
        return {"value": output_gradient.reshape(output_gradient.shape[0], *shape)}

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        return direction["value"].reshape(call.input.shape)
