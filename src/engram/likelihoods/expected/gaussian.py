r"""Gaussian noise around a Gaussian output: everything in closed form.

.. math:: \mathbb{E}[\ell] = \tfrac{(m - y)^2 + v}{2 \sigma^2} + \tfrac12 \log 2\pi\sigma^2, \qquad
    e = (m - y) / \sigma^2, \qquad \beta = 1 / \sigma^2
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram.core.errors import LikelihoodError
from engram.likelihoods.expected.base import ExpectedLoss
from engram.likelihoods.expected.targets import one_number


def noise_variances(noise_variance: float | Tensor, like: Tensor) -> Tensor:
    """One positive noise variance per example, [N, 1], from one number or N."""
    values = torch.as_tensor(noise_variance, dtype=like.dtype, device=like.device).detach()
    values = values.reshape(-1, 1)
    if len(values) not in (1, len(like)):
        raise LikelihoodError(
            f"one noise variance, or {len(like)}, one per example",
            f"{len(values)}",
            "give as many as targets",
        )
    if not (torch.isfinite(values) & (values > 0)).all():
        raise LikelihoodError(
            "positive noise variances", f"{float(values.min()):.4g}", "estimate it from residuals"
        )
    return values.expand(len(like), 1)


class GaussianNoise(ExpectedLoss):
    """-log N(y | f, noise variance), the noise being one number or one per example.

    Example:
        >>> loss = GaussianNoise(0.5)
        >>> loss.residual(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
        tensor([[2.]])
    """

    name = "gaussian"

    def __init__(self, noise_variance: float | Tensor = 1.0) -> None:
        self.noise_variance = noise_variance

    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        noise_variances(self.noise_variance, mean)
        return one_number(mean, targets, self.name)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.predictive_loss(outputs, torch.zeros_like(outputs), targets)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        noise = noise_variances(self.noise_variance, mean)
        square = (mean - targets) ** 2 + variance
        return (0.5 * square / noise + 0.5 * torch.log(2 * math.pi * noise))[:, 0]

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return (mean - targets) / noise_variances(self.noise_variance, mean)

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return 1 / noise_variances(self.noise_variance, mean)

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = variance + noise_variances(self.noise_variance, mean)
        square = (mean - targets) ** 2 / total
        return (0.5 * square + 0.5 * torch.log(2 * math.pi * total))[:, 0]

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    def on(self, indices: Tensor) -> ExpectedLoss:
        noise = self.noise_variance
        if not isinstance(noise, Tensor) or noise.numel() == 1:
            return self
        return GaussianNoise(noise.reshape(-1)[indices])

    def __repr__(self) -> str:
        noise = torch.as_tensor(self.noise_variance)
        return f"GaussianNoise({float(noise):.6g})" if noise.numel() == 1 else "GaussianNoise([N])"
