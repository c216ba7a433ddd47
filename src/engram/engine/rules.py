"""What a rule is: how one kind of operation turns gradients and weight changes into tensors.

A *site* is a place where parameters meet the data: one call of an operation such as ``linear``
with a parameter of the model. With the input a of the call and the gradient g at its output, a
rule gives the two maps that everything else is made of:

- ``gradient``: the gradient of each example's loss with respect to the parameters, [B, *shape];
- ``tangent``: the change of the operation's output when each example has its own change of the
  parameters.

An output deviates by ``tangent(S^-1 gradient)``; its variance is ``<gradient, S^-1 gradient>``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Roles = dict[str, Tensor]


@dataclass(frozen=True)
class Bound:
    """The arguments of one call, by meaning: data input, parameters by role, settings."""

    input: Tensor
    parameters: Roles
    settings: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One recorded call with the batch moved to the front: input [B * multiplicity, ...].

    ``multiplicity`` is above 1 where a model folds positions into the batch dimension.
    """

    input: Tensor
    shapes: dict[str, torch.Size]
    settings: dict[str, Any]
    multiplicity: int = 1
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_examples(self) -> int:
        """B."""
        return self.input.shape[0] // self.multiplicity

    def narrow(self, start: int, stop: int) -> Call:
        """The same call for examples start to stop."""
        m = self.multiplicity
        return replace(self, input=self.input[start * m : stop * m], kept={})

    def keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that both maps of a rule need, made once per call."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


class Rule(ABC):
    """How one kind of operation differentiates with respect to its parameters."""

    functions: tuple[Function, ...]

    @abstractmethod
    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        """The call's arguments by meaning, or None where the rule does not hold for them."""

    @abstractmethod
    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        """Per-example gradients by role, [B, *shape]."""

    @abstractmethod
    def tangent(self, call: Call, direction: Roles) -> Tensor:
        """Change of the output for a change [B, *shape] of each parameter by role."""

    def bytes_per_example(self, call: Call) -> int:
        """Memory that the two maps need for one example, apart from input and output."""
        entries = sum(math.prod(shape) for shape in call.shapes.values())
        return 2 * entries * call.input.element_size()


def sum_positions(call: Call, per_row: Tensor) -> Tensor:
    """[B * multiplicity, *shape] -> [B, *shape]."""
    if call.multiplicity == 1:
        return per_row
    return per_row.unflatten(0, (call.num_examples, call.multiplicity)).sum(1)


def repeat_positions(call: Call, per_example: Tensor) -> Tensor:
    """[B, *shape] -> [B * multiplicity, *shape]."""
    if call.multiplicity == 1:
        return per_example
    return per_example.repeat_interleave(call.multiplicity, dim=0)


class Copies(Rule):
    """A parameter given to each example as a copy of its own: both maps are the identity."""

    functions = ()

    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        return None

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        shape = call.shapes["value"]
        return {"value": output_gradient.reshape(output_gradient.shape[0], *shape)}

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        return direction["value"].reshape(call.input.shape)
