"""The larger or smaller of two tensors, whose derivative is a product with a mask.

The library compares, divides and fills anew for either tensor in every backward pass, ten
operations where three do; a pass here runs backward several times through one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Maximum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        # ties: half to each, as the library has it
        share = torch.gt(first, second).to(first.dtype) + torch.ge(first, second)
        return torch.maximum(first, second), share / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.shapes = tuple(value.shape for value in inputs)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (share,) = ctx.saved_tensors
        first = gradients[0] * share
        second = gradients[0] - first
        return first.sum_to_size(ctx.shapes[0]), second.sum_to_size(ctx.shapes[1])


def maximum(first: Tensor, second: Tensor) -> Tensor:
    """What ``torch.maximum`` gives."""
    result: Tensor = _Maximum.apply(first, second)[0]  # type: ignore[no-untyped-call]
    return result


def minimum(first: Tensor, second: Tensor) -> Tensor:
    """What ``torch.minimum`` gives."""
    return -maximum(-first, -second)


OWN: dict[Callable[..., Any], Callable[[Tensor, Tensor], Tensor]] = {
    torch.max: maximum,
    torch.maximum: maximum,
    torch.min: minimum,
    torch.minimum: minimum,
    Tensor.max: maximum,
    Tensor.maximum: maximum,
    Tensor.min: minimum,
    Tensor.minimum: minimum,
}


def own_extreme(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Ours in place of a function that compares two tensors of one floating-point type."""
    chosen = OWN.get(function)
    if chosen is None or kwargs or len(args) != 2:
        return None
    first, second = args
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return None
    alike = first.dtype == second.dtype and first.is_floating_point()
    return chosen if alike else None
