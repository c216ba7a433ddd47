"""Squares and means, against the library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engram.engine.mean_square import mean, own_moment, square

INPUT = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).double()

Way = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
REPLACED: list[Way] = [
    (torch.square, (INPUT,), {}),
    (Tensor.square, (INPUT,), {}),
    (Tensor.pow, (INPUT, 2), {}),
    (torch.pow, (INPUT, 2.0), {}),
    (Tensor.mean, (INPUT, (2, 3), True), {}),
    (Tensor.mean, (INPUT, -1), {"keepdim": True}),
    (torch.mean, (INPUT,), {"dim": [1, 3]}),
]
LEFT: list[Way] = [
    (Tensor.pow, (INPUT, 3), {}),
    (Tensor.pow, (INPUT, INPUT), {}),
    (torch.pow, (2, INPUT), {}),
    (torch.pow, (INPUT,), {"exponent": 2}),
    (torch.square, (INPUT,), {"out": INPUT}),
    (Tensor.mean, (INPUT,), {}),
    (Tensor.mean, (INPUT, []), {}),
    (Tensor.mean, (INPUT, 1), {"dtype": torch.float32}),
    (Tensor.mean, (INPUT.half(), 1), {}),
    (Tensor.sum, (INPUT, 1), {}),
]


@pytest.mark.parametrize("way", REPLACED)
def test_values_and_gradients(way: Way) -> None:
    function, args, kwargs = way
    ours = own_moment(function, args, kwargs)
    assert ours is not None
    found = []
    for chosen in (ours, function):
        leaf = INPUT.clone().requires_grad_()
        value = chosen(leaf, *args[1:], **kwargs)
        seed = torch.linspace(1, 2, value.numel()).double().reshape(value.shape)
        found.append([value.detach(), *torch.autograd.grad(value, leaf, seed)])
    torch.testing.assert_close(*found, rtol=1e-14, atol=0)


def test_derivatives_of_every_order() -> None:
    leaf = INPUT.clone().requires_grad_()
    for function in (square, lambda x: mean(square(x), (2, 3)), lambda x: square(x) * x):
        assert torch.autograd.gradcheck(function, leaf)
        assert torch.autograd.gradgradcheck(function, leaf)


def test_one_example_at_a_time() -> None:
    def normalised(x: Tensor) -> Tensor:
        return x * mean(square(x), (1, 2), keepdim=True).rsqrt()

    found = torch.func.vmap(torch.func.jacrev(normalised))(INPUT)
    each = torch.stack([torch.func.jacrev(normalised)(x) for x in INPUT])
    torch.testing.assert_close(found, each)


@pytest.mark.parametrize("way", LEFT)
def test_what_is_left_to_the_library(way: Way) -> None:
    assert own_moment(*way) is None
