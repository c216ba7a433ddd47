"""Squares and means, whose backward passes make no tensor that they do not need.

The library's backward pass of a mean writes out one quotient per entry, and that of a square
multiplies a copy of its input by two before the gradient comes in: three tensors of the full size
where the product alone is needed. A normalisation by mean squares has both, and a pass here runs
backward several times through one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor


class _Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor) -> Tensor:
        return input.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        return 2 * _without_repeats(gradients[0]) * input


def _without_repeats(expanded: Tensor) -> Tensor:
    """One entry along every dimension in which all entries are the same memory."""
    for dim, stride in enumerate(expanded.stride()):
        if stride == 0 and expanded.shape[dim] > 1:
            expanded = expanded.narrow(dim, 0, 1)
    return expanded


def square(input: Tensor, exponent: float = 2) -> Tensor:
    """What ``input.pow(2)`` gives."""
    result: Tensor = _Square.apply(input)  # type: ignore[no-untyped-call]
    return result


def mean(input: Tensor, dim: int | list[int] | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """What ``input.mean(dim, keepdim)`` gives: the quotient is taken after the sum."""
    total = input.sum(dim, keepdim=keepdim)
    return total / prod(input.shape[d] for d in ([dim] if isinstance(dim, int) else dim))


OWN: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **dict.fromkeys((torch.pow, Tensor.pow, torch.square, Tensor.square), square),
    **dict.fromkeys((torch.mean, Tensor.mean), mean),
}


def own_moment(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Tensor] | None:
    """Ours in place of a square, or of a mean over some dimensions, in single or double."""
    chosen = OWN.get(function)
    if chosen is None or not args or not isinstance(args[0], Tensor):
        return None
    if args[0].dtype not in (torch.float32, torch.float64):  # a sum in half precision overflows
        return None
    if chosen is mean:
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        return mean if kwargs.keys() <= {"dim", "keepdim"} and _are_dimensions(dims) else None
    if kwargs:
        return None
    exponent = args[1] if len(args) > 1 else 2
    return square if isinstance(exponent, (int, float)) and exponent == 2 else None


def _are_dimensions(dims: Any) -> bool:
    """Given by number; an empty list stands for all of them in the library."""
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return len(listed) > 0 and all(type(dim) is int for dim in listed)
