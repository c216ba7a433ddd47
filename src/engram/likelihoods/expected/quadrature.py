r"""Smooth losses of one output, averaged by Gauss-Hermite quadrature.

.. math:: \mathbb{E}[h(f)] \approx \sum_q w_q\, h(m + \sqrt{v}\, z_q)

The derivatives by the mean are those of the loss under the same sum.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engram.core.errors import LikelihoodError
from engram.likelihoods.expected.base import ExpectedLoss
from engram.likelihoods.expected.targets import counts, signs

FEWEST_POINTS = 8


class Quadrature(ExpectedLoss):
    """A smooth negative log likelihood of one output.

    Args:
        num_points: of the quadrature; 100 are good to 1e-7 for variances up to 2, of a count too.
    """

    def __init__(self, num_points: int = 100) -> None:
        if num_points < FEWEST_POINTS:
            raise LikelihoodError(
                f"at least {FEWEST_POINTS} quadrature points", repr(num_points), "use 100"
            )
        self.num_points = num_points

    @abstractmethod
    def negative_log(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, elementwise, broadcasting."""

    @abstractmethod
    def target_mean(self, outputs: Tensor) -> Tensor:
        """The expected target given f, elementwise."""

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.negative_log(outputs, targets)[:, 0]

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self._average(mean, variance, lambda f: self.negative_log(f, targets))[:, 0]

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self._average(mean, variance, lambda f: self._derivatives(f, targets)[0])

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self._average(mean, variance, lambda f: self._derivatives(f, targets)[1])

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        points, weights = self._nodes(mean, variance)
        return -torch.logsumexp(weights.log() - self.negative_log(points, targets), 0)[:, 0]

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self._average(mean, variance, self.target_mean)

    def _nodes(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Places [Q, N, 1] and weights [Q, 1, 1]."""
        places, weights = np.polynomial.hermite_e.hermegauss(self.num_points)
        standard = torch.as_tensor(places).to(mean)[:, None, None]
        shares = torch.as_tensor(weights / weights.sum()).to(mean)[:, None, None]
        return mean + variance.sqrt() * standard, shares

    def _average(
        self, mean: Tensor, variance: Tensor, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        points, weights = self._nodes(mean, variance)
        return (weights * function(points)).sum(0)

    def _derivatives(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            total = self.negative_log(leaf, targets).sum()
            first = torch.autograd.grad(total, leaf, create_graph=True)[0]
            second = torch.autograd.grad(first.sum(), leaf)[0]
        return first.detach(), second


class Probit(Quadrature):
    """-log Phi(y f): GPyTorch's Bernoulli likelihood; labels 0 and 1, or -1 and 1."""

    name = "probit"

    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        return signs(mean, targets, self.name)

    def negative_log(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -torch.special.log_ndtr(targets * outputs)

    def target_mean(self, outputs: Tensor) -> Tensor:
        return torch.special.ndtr(outputs)

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self.negative_log(mean / (1 + variance).sqrt(), targets)[:, 0]

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self.target_mean(mean / (1 + variance).sqrt())


class Logit(Quadrature):
    """-log sigmoid(y f); labels 0 and 1, or -1 and 1."""

    name = "logit"

    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        return signs(mean, targets, self.name)

    def negative_log(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.softplus(-targets * outputs)

    def target_mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()


class LogPoisson(Quadrature):
    """Counts with rate exp(f)."""

    name = "log_poisson"

    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        return counts(mean, targets, self.name)

    def negative_log(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp() - targets * outputs + torch.lgamma(targets + 1)

    def target_mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()


class SoftplusPoisson(Quadrature):
    """Counts with rate log(1 + exp(f)): GPyTorch's Poisson likelihood."""

    name = "softplus_poisson"

    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        return counts(mean, targets, self.name)

    def negative_log(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # log softplus(f) tends to f far below zero, where softplus itself underflows
        low = outputs < -20
        rate = functional.softplus(outputs)
        log_rate = torch.where(low, outputs, torch.where(low, 1.0, rate).log())
        return rate - targets * log_rate + torch.lgamma(targets + 1)

    def target_mean(self, outputs: Tensor) -> Tensor:
        return functional.softplus(outputs)
