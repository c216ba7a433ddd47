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
    """torch's own L-BFGS, then Newton with the dense Hessian, far below any tolerance here."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=200, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(model, x, y, weights, delta)
        value.backward()
        return value

    optimizer.step(closure)
    return newton_refit(model, x, y, weights, delta)


def newton_refit(
    model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, delta: float
) -> nn.Module:
    """Newton's method with the dense Hessian from near the minimum, to rounding."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def value(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        named = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        outputs = torch.func.functional_call(model, named, (x,))
        losses = nn.functional.cross_entropy(outputs, y, reduction="none")
        return (weights * losses).sum() + 0.5 * delta * (flat**2).sum()

    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _ in range(20):
        gradient = torch.func.grad(value)(flat)
        if gradient.norm() < 1e-11:
            break
        flat = flat - torch.linalg.solve(torch.autograd.functional.hessian(value, flat), gradient)
    assert torch.func.grad(value)(flat).norm() < 1e-9
    nn.utils.vector_to_parameters(flat, model.parameters())
    return model


def cosine(rate: float, step: int, total: int) -> float:
    return 0.5 * rate * (1 + math.cos(math.pi * step / total))
