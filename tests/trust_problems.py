"""Models at a minimum, at a saddle and on the way, with the dense Hessian of their objective."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian

import engram
from retraining_problems import classifier, minimised

DELTA = 3.0


def trained(delta: float = DELTA) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small classifier at the minimum of its regularised objective."""
    model, x, y = classifier()
    return minimised(model, x, y, torch.ones(len(x), dtype=torch.float64), delta), (x, y)


def untrained() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The same at its first weights, far from any minimum."""
    model, x, y = classifier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model, (x, y)


def saddle() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """y = a b x at a = b = 0, where the gradient vanishes and H is [[delta, -s], [-s, delta]]."""
    x = torch.linspace(1.0, 2.0, 20, dtype=torch.float64)[:, None]
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model, (x, 2 * x)


def dense_hessian(model: nn.Module, data: tuple[Tensor, Tensor], delta: float) -> Tensor:
    """Of the sum of the cross-entropies plus delta/2 |theta|^2, [P, P]."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    shapes = [p.shape for p in named.values()]
    flat = torch.cat([p.flatten() for p in named.values()])

    def objective(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        weights = {n: p.reshape(s) for n, p, s in zip(named, parts, shapes, strict=True)}
        outputs = functional_call(model, weights, (data[0],))
        loss = nn.functional.cross_entropy(outputs, data[1], reduction="sum")
        return loss + 0.5 * delta * (vector**2).sum()

    return hessian(objective)(flat)


def judged(
    model: nn.Module, data: tuple[Tensor, Tensor], structure: str, delta: float, **settings: object
) -> tuple[engram.Result, engram.Posterior]:
    """A result and its posterior."""
    likelihood = settings.pop("likelihood", "categorical")
    posterior = engram.laplace(
        model,
        data,
        likelihood=likelihood,
        structure=structure,
        prior_precision=delta,
        progress=False,
    )
    result = engram.sensitivities(model, data, posterior, progress=False, **settings)
    return result, posterior
