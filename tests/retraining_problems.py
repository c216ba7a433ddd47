"""Small problems with a known answer, and plain loops that train one copy at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from engram.likelihoods import Gaussian

PRIOR_PRECISION, NOISE_VARIANCE = 0.7, 0.4
RIDGE = Gaussian(NOISE_VARIANCE)


def ridge_fit(x: Tensor, y: Tensor) -> Tensor:
    """argmin sum |y - x B|^2 / (2 s2) + delta/2 |B|^2, [D, K]."""
    gram = x.T @ x / NOISE_VARIANCE + PRIOR_PRECISION * torch.eye(x.shape[1]).double()
    return torch.linalg.solve(gram, x.T @ y / NOISE_VARIANCE)


def ridge_problem(num_data: int = 14) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_data, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(num_data, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(ridge_fit(x, y).T)
    return model, x, y


def ridge_without(x: Tensor, y: Tensor, members: list[int]) -> Tensor:
    kept = torch.tensor([i for i in range(len(x)) if i not in members])
    return ridge_fit(x[kept], y[kept])


def classifier(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """A small net with three classes that overlap, not trained yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y = torch.arange(36) % 3
        x = torch.randn(36, 4) + torch.eye(3, 4)[y]
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.to(dtype), x.to(dtype), y


def objective(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, delta: float) -> Tensor:
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    return (weights * losses).sum() + 0.5 * delta * sum((p**2).sum() for p in model.parameters())


def minimised(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, delta: float) -> nn.Module:
    """torch's own L-BFGS, to a gradient norm far below any tolerance here."""
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=2000,
        tolerance_grad=1e-10,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(model, x, y, weights, delta)
        value.backward()
        return value

    optimizer.step(closure)
    return model


def cosine(rate: float, step: int, total: int) -> float:
    return 0.5 * rate * (1 + math.cos(math.pi * step / total))
