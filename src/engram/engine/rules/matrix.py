r"""What every layer whose weight is a matrix has in common.

With rows r_t [O] and columns c_t [I] at each of T positions the per-example gradient is
:math:`\sum_t r_t c_t'`. For a linear layer the columns are its inputs and the rows its output
gradients; a convolution is a linear layer on patches; in a transposed convolution the two
change places. One position and nothing else is a rank-one gradient, which never has to be built.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from engram.engine.rules.base import Call, Function, Roles, Rule
from engram.linalg.kronecker_factors import Factors


class ProductRule(Rule):
    """A weight whose gradient is a sum of products r_t c_t' over positions, in groups."""

    def groups(self, call: Call) -> int:
        """Blocks of channels that do not mix."""
        return int(call.options.get("groups", 1))

    @abstractmethod
    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        """c, [B, groups, T, I]."""

    @abstractmethod
    def rows(self, call: Call, output_gradient: Tensor) -> Tensor:
        """r, [B, groups, T, O]."""

    def bias_gradient(self, call: Call, output_gradient: Tensor) -> Tensor:
        """Gradient of the bias, [B, channels]."""
        return self.rows(call, output_gradient).sum(2).flatten(1)

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        result: Roles = {}
        if "weight" in call.shapes:
            rows = self.rows(call, output_gradient).flatten(0, 1)
            columns = self.columns(call, output_gradient).flatten(0, 1)
            product = torch.bmm(rows.mT, columns)
            result["weight"] = product.reshape(call.num_examples, *call.shapes["weight"])
        if "bias" in call.shapes:
            result["bias"] = self.bias_gradient(call, output_gradient)
        return result

    def matrix(self, call: Call, weight: Tensor) -> Tensor:
        """A per-example weight change as [B * groups, O, I]."""
        groups = self.groups(call)
        rows = call.shapes["weight"][0] // groups
        return weight.reshape(call.num_examples * groups, rows, -1)


class MatrixRule(ProductRule):
    """y_t = W c_t + b at every position, with columns c_t that are made of the input alone."""

    kronecker_roles: ClassVar[tuple[str, ...]] = ("weight", "bias")

    @property
    def as_matrix(self) -> MatrixRule:
        """The rule itself."""
        return self

    @abstractmethod
    def input_columns(self, call: Call) -> Tensor:
        """c, [B, groups, T, I]."""

    @abstractmethod
    def has_one_position(self, call: Call) -> bool:
        """Whether the layer acts once on every example, on all of its input."""

    @abstractmethod
    def in_output_shape(self, call: Call, by_position: Tensor, shape: torch.Size) -> Tensor:
        """Vectors [B, T, O] of one group in the shape of the output, examples first."""

    def is_rank_one(self, call: Call) -> bool:
        """Whether every example's gradient is one product of output gradient and input."""
        return self.groups(call) == 1 and self.has_one_position(call)

    def columns(self, call: Call, output_gradient: Tensor) -> Tensor:
        return self.input_columns(call)

    def add_inputs(self, call: Call, factors: Factors) -> None:
        factors.add_columns(self.input_columns(call))

    def add_gradients(self, call: Call, output_gradient: Tensor, factors: Factors) -> None:
        factors.add_rows(self.rows(call, output_gradient))

    def input_tangent(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        tangent: Tensor,
    ) -> Tensor:
        """The layer without its bias."""
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        positions = result.shape[2:]
        if tangent.shape[1:] == weight.shape[1:] and positions.numel() == 1:  # the kernel covers it
            flat: Tensor = tangent.flatten(1) @ weight.flatten(1).mT
            return flat.reshape(*flat.shape, *positions)
        rest = {k: v for k, v in kwargs.items() if k not in ("weight", "bias")}
        found: Tensor = function(tangent, weight, None, *args[3:], **rest)
        return found
