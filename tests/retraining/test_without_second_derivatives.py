"""Training again where an operation has no second derivative: each copy by its own gradients."""

import pytest
import torch
from torch import nn

import engram


@pytest.mark.parametrize("copies", [1, 3])
def test_newton_without_second_derivatives_reaches_the_minimum(copies):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Hardsigmoid(), nn.Linear(4, 3)).double()
    x, y = torch.randn(9, 3).double(), torch.arange(9) % 3
    newton = engram.recipes.Newton(relative_gradient=1e-6)
    found, expected = (
        engram.retrain(
            model,
            (x, y),
            list(range(copies)),
            train=train,
            prior_precision=3.0,
            progress=False,
        )
        for train in (newton, engram.recipes.LBFGS(relative_gradient=1e-6))
    )
    assert found.converged.all()
    assert expected.converged.all()
    torch.testing.assert_close(found.loo_loss, expected.loo_loss, rtol=1e-4, atol=1e-5)
