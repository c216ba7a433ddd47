"""A small net with its Jacobians, and weights drawn from its posterior, built row by row."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import engram

SAMPLES, SEED = 3, 4


def problem(
    structure: str = "full", prior: float = 2.0
) -> tuple[nn.Module, tuple[Tensor, Tensor], engram.Posterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x = torch.randn(12, 4).double()
    data = (x, torch.arange(12) % 3)
    posterior = engram.laplace(model, data, structure=structure, prior_precision=prior)
    return model, data, posterior


def flat(model: nn.Module, scalar: Tensor) -> Tensor:
    grads = torch.autograd.grad(scalar, list(model.parameters()), retain_graph=True)
    return torch.cat([g.flatten() for g in grads])


def pieces(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """J [N, K, P], e [N, K] and Lambda [N, K, K]."""
    outputs = model(x)
    jacobian = torch.stack([torch.stack([flat(model, f) for f in row]) for row in outputs])
    p = outputs.softmax(1).detach()
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return jacobian, p - functional.one_hot(y, 3), hessian


def precision(posterior: engram.Posterior) -> Tensor:
    layout = posterior.layout
    return posterior.multiply_rows(torch.eye(layout.num_params).double(), layout)


def drawn(model: nn.Module, posterior: engram.Posterior) -> Iterator[nn.Module]:
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(SAMPLES):
        draw = posterior.sample(1, generator)
        other = copy.deepcopy(model)
        other.load_state_dict({name: value[0] for name, value in draw.items()})
        yield other


def gradients(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    jacobian, error, _ = pieces(model, *data)
    return torch.einsum("nkp,nk->np", jacobian, error)
