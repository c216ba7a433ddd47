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
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

Function = Callable[..., Any]
Roles = dict[str, Tensor]
Signatures = Mapping[Function, tuple[str, ...]]
WritesOut = Callable[[Function, tuple[Any, ...], dict[str, Any]], Callable[[], Any] | None]
AnyRule = TypeVar("AnyRule", bound="Rule")


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

    # the operations that the rule is for, each with the names of its arguments in their order
    signatures: ClassVar[Signatures]

    @abstractmethod
    def bind(self, arguments: Mapping[str, Any]) -> Bound | None:
        """The call's arguments by meaning, or None where the rule does not hold for them."""

    @abstractmethod
    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        """Per-example gradients by role, [B, *shape]."""

    @abstractmethod
    def tangent(self, call: Call, direction: Roles) -> Tensor:
        """Change of the output for a change [B, *shape] of each parameter by role."""

    def cheaper_call(self, bound: Bound) -> Tensor | None:
        """The operation by kernels whose second derivative costs less; None to run it as it is."""
        return None

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


RULES: dict[Function, Rule] = {}
PLAIN_FORMS: dict[Function, WritesOut] = {}


def register(kind: type[AnyRule]) -> type[AnyRule]:
    """Of a class of rules: from now on it handles the operations in its ``signatures``."""
    rule = kind()
    RULES.update(dict.fromkeys(rule.signatures, rule))
    return kind


def bind(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | None:
    """The call's arguments by meaning, or None where no rule holds."""
    rule = RULES.get(function)
    if rule is None:
        return None
    arguments = dict(zip(rule.signatures[function], args, strict=False)) | kwargs
    return rule.bind(arguments | {"function": function})


def writes_out(*functions: Function) -> Callable[[WritesOut], WritesOut]:
    """Of a function that writes these operations out in plain ones, which have rules.

    It takes the operation with its arguments and gives what to call instead, or None where the
    plain form does not cover them.
    """

    def registered(made: WritesOut) -> WritesOut:
        PLAIN_FORMS.update(dict.fromkeys(functions, made))
        return made

    return registered


def plain_form(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """The operation written out in plain ones, to be called; None where it has no such form."""
    writes = PLAIN_FORMS.get(function)
    return None if writes is None else writes(function, args, kwargs)
