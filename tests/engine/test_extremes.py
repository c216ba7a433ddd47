"""The larger or smaller of two tensors, against the library's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engram.engine.extremes import OWN, own_extreme

FIRST = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]], dtype=torch.float64)
SECOND = torch.tensor([[2.0], [0.0]], dtype=torch.float64)  # ties in both rows


@pytest.mark.parametrize("function", OWN)
def test_values_and_gradients_with_ties(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    ours = own_extreme(function, (FIRST, SECOND), {})
    assert ours is not None
    found = [_value_and_gradients(f, FIRST, SECOND) for f in (ours, function)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def _value_and_gradients(
    function: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor
) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in (first, second)]
    value = function(*leaves)
    seed = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
    return [value.detach(), *torch.autograd.grad(value, leaves, seed)]


def test_derivatives_of_every_order() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).double() for shape in ((3, 4), (3, 1))]
    leaves = [value.requires_grad_() for value in drawn]
    for function in (torch.maximum, torch.minimum):
        assert torch.autograd.gradcheck(OWN[function], leaves)
        assert torch.autograd.gradgradcheck(OWN[function], leaves)


def test_one_example_at_a_time() -> None:
    copies = SECOND.expand(4, 2, 1)
    batch = torch.stack([FIRST + n for n in range(4)])
    found = torch.func.vmap(OWN[torch.max])(batch, copies)
    torch.testing.assert_close(found, torch.maximum(batch, copies), rtol=0, atol=0)


@pytest.mark.parametrize(
    "arguments", [(FIRST,), (FIRST, 1), (FIRST, SECOND.float()), (FIRST.long(), SECOND.long())]
)
def test_what_is_left_to_the_library(arguments: tuple[Tensor, ...]) -> None:
    assert own_extreme(torch.max, arguments, {}) is None
    assert own_extreme(torch.max, (FIRST, SECOND), {"out": FIRST}) is None
    assert own_extreme(torch.add, (FIRST, SECOND), {}) is None
