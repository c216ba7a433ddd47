r"""Any number, with constant variance; averaged over a Gaussian output in closed form.

.. math:: \mathbb{E}[\ell] = \tfrac{(m - y)^2 + v}{2 \sigma^2} + \tfrac12 \log 2\pi\sigma^2, \qquad
    e = (m - y) / \sigma^2, \qquad \beta = 1 / \sigma^2
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import is_number
from engram.errors import LikelihoodError
from engram.likelihoods.base import ExpectedLoss
from engram.likelihoods.draws import Draws
from engram.likelihoods.elementwise import ElementwiseLikelihood
from engram.likelihoods.links import LINKS, Link
from engram.likelihoods.targets import like_outputs

# means that a fit with a link starts from: above zero, as logarithms and powers need them
LOWEST_START = 0.1  # share of the targets' mean size
SMALLEST_START = 1e-8  # where all targets are 0


class Gaussian(ElementwiseLikelihood):
    """Gaussian noise around the mean, for regression: the squared error over twice its variance.

    Args:
        noise_variance: of every target; how much noise there is decides how much the data count
            against the prior, so give the mean square of the residuals rather than 1.
        link: how the mean depends on the output; it is the output if not given.

    Example:
        >>> Gaussian(noise_variance=0.25).residual(torch.ones(1, 1), torch.zeros(1, 1))
        tensor([[4.]])
    """

    name, default_link, canonical_link = "gaussian", "identity", "identity"
    has_dispersion = True
    links = tuple(LINKS)
    support = "any number"

    def __init__(self, noise_variance: float = 1.0, link: str | Link | None = None) -> None:
        if not (is_number(noise_variance) and 0 < noise_variance < math.inf):
            raise LikelihoodError(
                "a positive noise variance",
                repr(noise_variance),
                "estimate it from residuals; a link is the second argument",
            )
        super().__init__(link, noise_variance)

    @property
    def noise_variance(self) -> float:
        """The dispersion."""
        return self.dispersion

    @property
    def is_quadratic(self) -> bool:
        return self.link.name == "identity"

    def settings(self) -> dict[str, Any]:
        return {"noise_variance": self.dispersion}

    def outside(self, targets: Tensor) -> Tensor:
        return torch.zeros_like(targets, dtype=torch.bool)

    def start(self, targets: Tensor) -> Tensor:
        if self.link.name == "identity":
            return targets
        return targets.clamp(min=LOWEST_START * float(targets.abs().mean()) + SMALLEST_START)

    def kernel(self, eta: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (self.link.mean(eta) - targets).square()

    def bent(self, targets: Tensor) -> Tensor:
        return 0.5 * targets * (targets - 1)

    def saturated(self, targets: Tensor) -> Tensor:
        return torch.zeros_like(targets)

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        return 0.5 * (2 * math.pi * dispersion).log().expand_as(targets)

    def variance(self, mean: Tensor) -> Tensor:
        return torch.ones_like(mean)

    def pull(self, eta: Tensor) -> Tensor:
        return self.link.slope(eta)

    def variance_growth(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        return self.link.slope(outputs) * draws.normal(outputs) / math.sqrt(self.dispersion)

    def expectation(self) -> ExpectedLoss:
        if self.link.name == "identity":
            return ExpectedGaussian(self.dispersion)
        return super().expectation()


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


class ExpectedGaussian(ExpectedLoss):
    """E[-log N(y | f, noise variance)], the noise being one number or one per example.

    Example:
        >>> loss = ExpectedGaussian(0.5)
        >>> loss.residual(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
        tensor([[2.]])
    """

    name = "gaussian"

    def __init__(self, noise_variance: float | Tensor = 1.0) -> None:
        self.noise_variance = noise_variance

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        noise_variances(self.noise_variance, outputs)
        return like_outputs(outputs, targets, self.name)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.predictive_loss(outputs, torch.zeros_like(outputs), targets)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        noise = noise_variances(self.noise_variance, mean)
        square = (mean - targets) ** 2 + variance
        return (0.5 * square / noise + 0.5 * torch.log(2 * math.pi * noise)).sum(1)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return (mean - targets) / noise_variances(self.noise_variance, mean)

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return (1 / noise_variances(self.noise_variance, mean)).expand_as(mean)

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = variance + noise_variances(self.noise_variance, mean)
        square = (mean - targets) ** 2 / total
        return (0.5 * square + 0.5 * torch.log(2 * math.pi * total)).sum(1)

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    def on(self, indices: Tensor) -> ExpectedLoss:
        noise = self.noise_variance
        if not isinstance(noise, Tensor) or noise.numel() == 1:
            return self
        return ExpectedGaussian(noise.reshape(-1)[indices])

    def __repr__(self) -> str:
        noise = torch.as_tensor(self.noise_variance)
        text = f"{float(noise):.6g}" if noise.numel() == 1 else "[N]"
        return f"expected Gaussian(noise_variance={text})"
