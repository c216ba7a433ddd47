"""Outputs that are independent given f: Bernoulli, Gaussian and Poisson targets."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from engram.core.arguments import is_number
from engram.core.errors import LikelihoodError, TargetError
from engram.likelihoods.base import Likelihood, check_numbers
from engram.likelihoods.draws import Draws


def _with_output_dimension(outputs: Tensor, targets: Tensor, kind: str) -> Tensor:
    if targets.dim() == 1 and outputs.shape[1] == 1:
        targets = targets[:, None]
    if targets.shape != outputs.shape:
        raise TargetError(
            f"{kind} targets of the outputs' shape {tuple(outputs.shape)}",
            f"shape {tuple(targets.shape)}",
            "give one number per output and example",
        )
    check_numbers(targets, kind)
    return targets.to(outputs.dtype)


class ElementwiseLikelihood(Likelihood):
    """Outputs that are independent given f: Lambda is diagonal."""

    @property
    def identity(self) -> str:
        """What is printed has all settings."""
        return repr(self)

    @abstractmethod
    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        """The diagonal of Lambda, [N, K]."""

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets.to(outputs.dtype).reshape(outputs.shape)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return self.hessian_diagonal(outputs) * vector

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.diag_embed(self.hessian_diagonal(outputs).sqrt())


class Bernoulli(ElementwiseLikelihood):
    """A logit for each 0/1 target; soft targets between 0 and 1 are allowed."""

    name = "bernoulli"

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = _with_output_dimension(outputs, targets, "bernoulli")
        if ((targets < 0) | (targets > 1)).any():
            raise TargetError(
                "bernoulli targets between 0 and 1",
                f"values from {float(targets.min()):.4g} to {float(targets.max()):.4g}",
                "code the two classes as 0 and 1",
            )
        return targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.form(outputs, targets)
        return (functional.softplus(outputs) - targets * outputs).sum(1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.form(outputs, targets)
        return outputs.sigmoid() - targets

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        return self.mean_derivative(outputs)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        probability = outputs.sigmoid()
        drawn = draws.uniform(probability.shape[1]).to(probability)
        return probability - (drawn < probability).to(probability)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        probability = outputs.sigmoid()
        return probability * (1 - probability)


class Gaussian(ElementwiseLikelihood):
    """Regression: targets around the outputs with a known noise variance, per output."""

    name = "gaussian"

    def __init__(self, noise_variance: float = 1.0) -> None:
        if not (is_number(noise_variance) and 0 < noise_variance < math.inf):
            raise LikelihoodError(
                "a positive noise variance", repr(noise_variance), "estimate it from residuals"
            )
        self.noise_variance = float(noise_variance)

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _with_output_dimension(outputs, targets, "gaussian")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.form(outputs, targets)
        constant = 0.5 * outputs.shape[1] * math.log(2 * math.pi * self.noise_variance)
        return 0.5 * ((outputs - targets) ** 2).sum(1) / self.noise_variance + constant

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.form(outputs, targets)
        return (outputs - targets) / self.noise_variance

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / self.noise_variance)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        return draws.normal(outputs) / math.sqrt(self.noise_variance)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        return torch.ones_like(outputs)

    def __repr__(self) -> str:
        return f"Gaussian(noise_variance={self.noise_variance})"


class Poisson(ElementwiseLikelihood):
    """Counts with a log link: the outputs are log rates."""

    name = "poisson"

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = _with_output_dimension(outputs, targets, "poisson")
        if (targets < 0).any():
            raise TargetError(
                "non-negative counts", f"a count of {float(targets.min()):.4g}", "check the targets"
            )
        return targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.form(outputs, targets)
        return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).sum(1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.form(outputs, targets)
        return outputs.exp() - targets

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        # a sign has the variance of a count around its rate, and needs no inverse of its sums
        return draws.signs(outputs) * outputs.exp().sqrt()

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        return outputs.exp()
