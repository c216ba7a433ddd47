"""Products with a matrix that all copies share, as one large product instead of many small ones.

``vmap`` turns ``linear(x, W_c)`` with one x for all copies into a batch of narrow products that
read x once a copy. Side by side, the weights make one matrix, and x is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class _Product(torch.autograd.Function):
    """A B for matrices, with a rule for ``vmap`` over one of them; its derivatives are the same."""

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        (gradient,) = gradients
        wanted_left, wanted_right = ctx.needs_input_grad
        return (
            product(gradient, right.mT) if wanted_left else None,
            product(left.mT, gradient) if wanted_right else None,
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], left: Tensor, right: Tensor
    ) -> tuple[Tensor, int]:
        left_dim, right_dim = in_dims
        if left_dim is None:
            assert right_dim is not None
            columns = right.movedim(right_dim, 1)  # [b, C, c]
            return product(left, columns.flatten(1)).unflatten(1, columns.shape[1:]), 1
        if right_dim is None:
            rows = left.movedim(left_dim, 0)  # [C, a, b]
            inner = int(rows.stride(0) < rows.stride(1))  # keep the order that is in memory
            rows = rows.movedim(0, inner)
            return product(rows.flatten(0, 1), right).unflatten(0, rows.shape[:2]), inner
        return left.movedim(left_dim, 0) @ right.movedim(right_dim, 0), 0


def product(left: Tensor, right: Tensor) -> Tensor:
    """A B for two matrices; under ``vmap`` over one of them, one product for the whole batch.

    Example:
        >>> left, right = torch.ones(2, 3), torch.ones(5, 3, 4)
        >>> torch.func.vmap(lambda r: product(left, r))(right).shape
        torch.Size([5, 2, 4])
    """
    found: Tensor = _Product.apply(left, right)  # type: ignore[no-untyped-call]
    return found


class Folded(TorchFunctionMode):
    """While this is entered, linear layers multiply by :func:`product`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() < 2 or not input.is_floating_point():
        return functional.linear(input, weight, bias)
    found = product(input.flatten(0, -2), weight.mT).unflatten(0, input.shape[:-1])
    return found if bias is None else found + bias
