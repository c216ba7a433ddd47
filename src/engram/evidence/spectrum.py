r"""How well S stands in for the Hessian H: the ends of the spectrum of :math:`S^{-1} H`.

All of it is 1 where S is H. A value below 0 means that H is indefinite: the parameters are at a
saddle, or not yet near a minimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.progress import progress_over
from engram.evidence.objective import Objective

BREAKDOWN = 1e-10


@dataclass(frozen=True)
class Spectrum:
    """Smallest and largest value found; the true ends lie at these or further out."""

    smallest: float
    largest: float


def spectrum(objective: Objective, steps: int, seed: int, progress: bool) -> Spectrum:
    """Lanczos in the inner product of S, from a random draw of the posterior.

    Args:
        steps: products with the Hessian, one pass over the data each.
    """
    vector = _draw(objective, seed)
    basis: list[Tensor] = []
    images: list[Tensor] = []  # S times the basis
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in progress_over(range(steps), "curvature", progress):
        image = objective.multiply(vector[None])[0]
        length = math.sqrt(max(float(vector @ image), 0.0))
        if basis:
            if length <= BREAKDOWN * max(map(abs, diagonal)):
                break
            beside.append(length)
        basis.append(vector / length)
        images.append(image / length)
        product = objective.hessian_times(basis[-1][None])[0]
        diagonal.append(float(basis[-1] @ product))
        vector = objective.solve(product[None])[0]
        for _ in range(2):  # rounding takes orthogonality away
            known, weighted = torch.stack(basis), torch.stack(images)
            vector = vector - (weighted @ vector) @ known
        if len(basis) == objective.layout.num_params:
            break
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    outer = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
    values = torch.linalg.eigvalsh(matrix + outer + outer.T)
    return Spectrum(float(values[0]), float(values[-1]))


def _draw(objective: Objective, seed: int) -> Tensor:
    posterior = objective.posterior
    device = objective.prior.device
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = posterior.sample(1, generator)
    moved = {name: drawn[name] - posterior.mean[name] for name in objective.layout.names}
    return objective.layout.flatten(moved)[0]
