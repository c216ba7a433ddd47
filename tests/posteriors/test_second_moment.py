"""Squared gradients of batches, scaled to those of single examples, against the formula by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError


@pytest.mark.parametrize("batch_size", [1, 9])
def test_squares_of_batches_scaled_to_examples(batch_size: int) -> None:
    """N sqrt(B s) + delta, by hand; the prior is not scaled."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.RMSprop(model.parameters(), weight_decay=0.5)
    model(torch.randn(9, 3, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    posterior = engram.posterior_of(
        optimizer, model, num_data=90, training_batch_size=batch_size, second_moment="example"
    )
    kept = optimizer.state[model.weight]["square_avg"]
    expected = 90 * (batch_size * kept).sqrt() + 90 * 0.5
    block = posterior.block_of["weight"]
    torch.testing.assert_close(block.precision.reshape(2, 3), expected, rtol=1e-12, atol=0)
    assert posterior.settings["second_moment"] == "example"
    assert posterior.prior_precision == 45.0


def test_squares_that_make_no_sense() -> None:
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    with pytest.raises(ArgumentError, match="batch_size"):
        engram.posterior_of(adam, model, num_data=10, second_moment="example")
    with pytest.raises(ArgumentError, match="example"):
        engram.posterior_of(adam, model, num_data=10, second_moment="best")
    sgd = torch.optim.SGD(model.parameters(), weight_decay=0.1)
    with pytest.raises(ArgumentError, match="no average of squared gradients"):
        engram.posterior_of(sgd, model, num_data=10, second_moment="example", training_batch_size=2)
