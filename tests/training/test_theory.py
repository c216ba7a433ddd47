"""What the training time is for: the difference of two trainings, one with a gradient added.

On a quadratic objective with Hessian S / N of the mean, D <- (I - eta P^-1 S / N) D + eta P^-1 g/N
ends, for small steps, at (I - exp(-C S / N)) S^-1 g.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import engram

NUM_DATA, STEPS = 50, 4000
ROOT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)  # what Adam divides by


def frozen_adam(parameters: Any) -> Optimizer:
    """An AdamW whose average of squares stays where it is."""
    optimizer = AdamW(parameters, lr=2e-3, betas=(0.9, 1 - 1e-12), weight_decay=0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(1e9),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": ROOT**2 * (1 - (1 - 1e-12) ** 1e9),
            }
    return optimizer


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=2e-3),
    "momentum": lambda p: SGD(p, lr=2e-4, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=2e-4, momentum=0.9, nesterov=True),
    "adam": frozen_adam,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_difference_of_two_trainings(kind: str) -> None:
    torch.manual_seed(0)
    root = torch.randn(3, 3, dtype=torch.float64)
    precision = NUM_DATA * (root @ root.T + 0.1 * torch.eye(3, dtype=torch.float64)) / 6
    gradient = torch.randn(3, dtype=torch.float64)

    def trained(added: Tensor) -> tuple[Tensor, Tensor]:
        model = nn.ParameterList([torch.zeros(3, dtype=torch.float64)])
        optimizer = KINDS[kind](model.parameters())
        training = engram.record(optimizer, model)
        weights = model[0]
        for _ in range(STEPS):
            weights.grad = (precision @ weights.detach() - added) / NUM_DATA
            optimizer.step()
        return weights.detach(), training.of(model).time["0"].expand(3)

    with_it, time = trained(gradient)
    without, _ = trained(torch.zeros(3, dtype=torch.float64))
    half = time.sqrt()  # exp(-C S / N) by the symmetric matrix that it is similar to
    values, vectors = torch.linalg.eigh(half[:, None] * precision * half / NUM_DATA)
    decayed = half[:, None] * (vectors * (-values).exp()) @ vectors.T / half
    expected = (torch.eye(3) - decayed) @ torch.linalg.solve(precision, gradient)
    full = torch.linalg.solve(precision, gradient)
    assert (expected - full).norm() > 0.05 * full.norm()  # not at the minimum yet
    torch.testing.assert_close(with_it - without, expected, rtol=5e-3, atol=1e-5)
