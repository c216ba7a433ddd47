"""What a rule is: how one kind of operation turns gradients and weight changes into tensors.

A *site* is a place where parameters meet the data: one call of an operation such as ``linear``
with a parameter of the model. With the input a of the call and the gradient g at its output, a
rule gives the two maps that everything else is made of:

- ``gradient``: the gradient of each example's loss with respect to the parameters, [B, *shape];
- ``tangent``: the change of the operation's output when each example has its own change of the
  parameters.

An output deviates by ``tangent(S^-1 gradient)``; its variance is ``<gradient, S^-1 gradient>``.
All else that a rule can do has a default: what a layer's Kronecker factors are made of, and shorter
ways than through the gradient of every example. Who has a rule asks it, and never what kind it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from engram.linalg.block import GradientSum, MatrixBlock
from engram.linalg.kronecker_factors import Factors

if TYPE_CHECKING:
    from engram.engine.rules.matrix import MatrixRule

Function = Callable[..., Any]
Roles = dict[str, Tensor]
Signatures = Mapping[Function, tuple[str, ...]]
WritesOut = Callable[[Function, tuple[Any, ...], dict[str, Any]], Callable[[], Any] | None]
AnyRule = TypeVar("AnyRule", bound="Rule")

# Bytes of temporaries made at a time: so many stay in the processor's cache and are reused by the
# allocator; 2 to 3 times faster on convolutions than one buffer for the whole batch.
CHUNK_BYTES = 6 * 2**20


@dataclass(frozen=True)
class Bound:
    """The arguments of one call, by meaning: data input, parameters by role, options."""

    input: Tensor
    parameters: Roles
    options: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One recorded call with the batch moved to the front: input [B * multiplicity, ...].

    ``multiplicity`` is above 1 where a model folds positions into the batch dimension.
    """

    input: Tensor
    shapes: dict[str, torch.Size]
    options: dict[str, Any]
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

    def at_positions(self, chosen: Tensor) -> Call:
        """The same call at some positions [B, T], as if each were an example by itself."""
        flat = self.input.reshape(chosen.numel(), -1)[chosen.flatten()]
        return replace(self, input=flat, multiplicity=1, kept={})

    def keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that both maps of a rule need, made once per call."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


class Rule(ABC):
    """How one kind of operation differentiates with respect to its parameters."""

    # the operations that the rule is for, each with the names of its arguments in their order
    signatures: ClassVar[Signatures]
    # roles whose parameters have Kronecker factors in common, the weight first; none without any
    kronecker_roles: ClassVar[tuple[str, ...]] = ()
    # whether the input may have one dimension more in front, and the output then has it too
    takes_leading: ClassVar[bool] = False
    # whether input and output have the same positions in the same order, [B, T, ...] each
    counts_positions: ClassVar[bool] = False

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

    # of K-FAC, for rules with kronecker_roles

    def add_inputs(self, call: Call, factors: Factors) -> None:
        """Add to the factors what the inputs of a batch say; once a batch."""
        raise NotImplementedError

    def add_gradients(self, call: Call, output_gradient: Tensor, factors: Factors) -> None:
        """Add to the factors what the gradients of one output vector say."""
        raise NotImplementedError

    # shorter ways, where there are any

    def summed_gradient(self, call: Call, output_gradient: Tensor) -> Roles | None:
        """The sum of all examples' gradients, [*shape]; None where each has to be built for it."""
        return None

    @property
    def as_matrix(self) -> MatrixRule | None:
        """The rule itself where the layer is a matrix that acts on columns of its input."""
        return None

    def perturbation(
        self,
        call: Call,
        output_gradient: Tensor,
        names: Mapping[str, str],
        blocks: Sequence[MatrixBlock],
        total: GradientSum,
    ) -> Tensor | None:
        """tangent(S^-1 gradient) without the gradients, in the shape of the output gradient.

        Args:
            names: of the call's parameters in the model, by role.
            blocks: of S, that cover them.
            total: the sum of all gradients is added to it.

        Returns:
            None where these blocks allow no way that is shorter.
        """
        return None

    def picked_rows(self, call: Call) -> Tensor | None:
        """Which row of the weight each position picks, [B, T]; None where it uses all of them."""
        return None

    def picked_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        """The gradient at each position of the row that it picks, [B, T, D]."""
        raise NotImplementedError

    def summed_by_row(self, call: Call, output_gradient: Tensor) -> Tensor:
        """At each position the gradient of the row that it picks, all its positions added."""
        raise NotImplementedError

    def together(self, calls: Sequence[Call]) -> Call | None:
        """Calls with the same parameters as one at all their positions; None where there is none.

        Gradients and changes of its output are those of the calls, [B, T, ...], side by side.
        """
        return None

    def input_tangent(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        tangent: Tensor,
    ) -> Tensor | None:
        """The result's tangent from that of the input alone; None to find it by dual numbers."""
        return None


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
