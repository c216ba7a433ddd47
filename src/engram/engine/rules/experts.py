"""Linear layers of a mixture of experts: each position goes through the one that it was sent to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engram.engine.rules.base import Bound, Call, Function, Roles, Signatures, register
from engram.engine.rules.matrix import MatrixRule
from engram.linalg.kronecker_factors import Factors


def sent(inputs: Tensor, experts: Tensor) -> Tensor:
    """Inputs [S, I] with the numbers of their experts [S] as a last column: one tensor of rows."""
    return torch.cat([inputs, experts.to(inputs)[:, None]], dim=1)


def routed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_s = W_e(s) x_s + b_e(s), [S, O].

    Args:
        input: x with the expert's number last, [S, I + 1], as :func:`sent` makes it.
        weight: of all experts, [E, O, I].
        bias: likewise, [E, O].

    Example:
        >>> weight = torch.tensor([[[1.0]], [[10.0]]])
        >>> routed_linear(sent(torch.tensor([[2.0], [3.0]]), torch.tensor([1, 0])), weight)
        tensor([[20.],
                [ 3.]])
    """
    given = (input, weight) if bias is None else (input, weight, bias)
    if has_torch_function(given):  # one operation to whoever looks on
        found: Tensor = handle_torch_function(routed_linear, given, input, weight, bias)
        return found
    experts = input[:, -1].long()
    order = experts.argsort(stable=True)
    parts = input[order, :-1].split(experts.bincount(minlength=len(weight)).tolist())
    biases = [None] * len(weight) if bias is None else list(bias)
    moved = [functional.linear(x, w, b) for x, w, b in zip(parts, weight, biases, strict=True)]
    return torch.cat(moved)[order.argsort()]


@register
class RoutedLinear(MatrixRule):
    """A layer of as many groups as there are experts, at the positions that each was sent."""

    signatures: ClassVar[Signatures] = {routed_linear: ("input", "weight", "bias")}

    def bind(self, arguments: Mapping[str, Any]) -> Bound:
        weight, bias = arguments["weight"], arguments.get("bias")
        parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return Bound(arguments["input"], parameters, {"groups": len(weight)})

    def _present(self, call: Call) -> Tensor:
        """Whether each position was sent to each expert, [B, E, T, 1]."""
        number = torch.arange(self.groups(call), device=call.input.device)
        own = call.input[:, -1].reshape(call.num_examples, 1, -1, 1).long() == number[:, None, None]
        return own.to(call.input)

    def input_columns(self, call: Call) -> Tensor:
        inputs = call.input[:, :-1]
        return inputs.reshape(call.num_examples, 1, -1, inputs.shape[-1]) * self._present(call)

    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        own = output_gradient.reshape(call.num_examples, 1, -1, output_gradient.shape[-1])
        return own * self._present(call)

    def bias_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self.rows(call, output_gradient).sum(2)

    def has_one_position(self, call: Call) -> bool:
        return False

    def in_output_shape(self, call: Call, by_position: Tensor, shape: torch.Size) -> Tensor:
        return by_position.reshape(shape)

    def add_inputs(self, call: Call, factors: Factors) -> None:
        factors.add_columns(self.input_columns(call), self._present(call).sum((0, 2, 3)))

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        moved = []
        if "weight" in direction:
            moved.append((self.input_columns(call) @ direction["weight"].mT).sum(1))
        if "bias" in direction:
            moved.append((self._present(call) * direction["bias"][:, :, None]).sum(1))
        return sum(moved[1:], moved[0]).flatten(0, 1)

    def bytes_per_example(self, call: Call) -> int:
        columns = self.groups(call) * call.multiplicity * call.input.shape[-1]
        return super().bytes_per_example(call) + 2 * columns * call.input.element_size()

    def input_tangent(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        tangent: Tensor,
    ) -> Tensor:
        """Sent as the inputs are; without the bias."""
        inputs, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
        return routed_linear(sent(tangent[:, :-1], inputs[:, -1]), weight)
