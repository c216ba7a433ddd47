"""Parameters that meet data entry by entry, in every shape that broadcasts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from benchmarks import torch_func
from torch import Tensor, nn

import engram

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 3, 4, generator=GENERATOR).double()
Y = torch.randn(6, 2, generator=GENERATOR).double()
SHAPES = [(3, 4), (4,), (3, 1), (1, 3, 1), (1, 1, 4), (1,), ()]
FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    *(torch.add, torch.mul, torch.div, torch.maximum, torch.min),
    *(lambda x, p: x - p, lambda x, p: p - x, lambda x, p: p / x, lambda x, p: p.__rsub__(x)),
]


class Net(nn.Module):
    """One operation of two tensors, and a layer behind it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]):
        super().__init__()
        self.function = function
        self.own = nn.Parameter(torch.full(shape, 0.7).double())
        self.head = nn.Linear(12, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.function(x, self.own).flatten(1))
        return outputs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_deviations_are_those_of_one_example_at_a_time(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = Net(function, shape)
    posterior = engram.laplace(
        model, (X, Y), structure="diagonal", likelihood="gaussian", prior_precision=3.0
    )
    result = engram.sensitivities(model, (X, Y), posterior, estimator="linear")
    residual = model(X).detach() - Y
    expected = torch_func.deviation(model, (X,), residual, posterior)
    torch.testing.assert_close(result.deviation, expected, rtol=1e-10, atol=1e-12)
