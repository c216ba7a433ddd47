"""Small problems whose loss, gradient, Hessian and optimum are written down without autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NUM_DATA, DELTA = 40, 1.5


def ridge() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(NUM_DATA, 1, generator=generator, dtype=torch.float64)


def logistic() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, 2, generator=generator, dtype=torch.float64)
    noisy = x @ torch.tensor([1.5, -1.0], dtype=torch.float64)
    noisy = noisy + torch.randn(NUM_DATA, generator=generator, dtype=torch.float64)
    return x, (noisy > 0).double()[:, None]


def line(num_inputs: int, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(num_inputs, 1, bias=False).double()


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return lambda: 0.5 * (model(x) - y).square().sum(1).mean()


def binary(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return lambda: nn.functional.binary_cross_entropy_with_logits(model(x), y)


def ridge_solution(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Optimum [P] and Hessian of the regularised sum of half squared errors."""
    hessian = x.mT @ x + DELTA * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(hessian, x.mT @ y[:, 0]), hessian


def logistic_derivatives(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient [P] and Hessian [P, P] of the sum of the losses of x, without the prior."""
    probability = torch.sigmoid(x @ theta)
    hessian = x.mT @ ((probability * (1 - probability))[:, None] * x)
    return x.mT @ (probability - y[:, 0]), hessian


def network(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def classes() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_DATA, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (NUM_DATA,), generator=generator)
