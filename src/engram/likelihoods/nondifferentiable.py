r"""Losses with kinks or jumps, averaged over a Gaussian output in closed form.

With :math:`f \sim N(m, s^2)`, the normal density :math:`\varphi` and distribution :math:`\Phi`:

========== ======================= ====================================== ================
loss       z                       E[loss]                                e, beta
========== ======================= ====================================== ================
hinge      (margin - ym) / s       s (z Phi + phi)                        -y Phi, phi / s
0-1        ym / s                  Phi(-z)                                -y phi / s, z phi / s^2
quantile   (m - y) / s             s (z (Phi - tau) + phi)                Phi - tau, phi / s
absolute   (m - y) / s             twice the quantile loss at tau = 1/2
========== ======================= ====================================== ================
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engram.errors import LikelihoodError
from engram.likelihoods.base import ExpectedLoss
from engram.likelihoods.targets import like_outputs, signs


def _deviation(variance: Tensor) -> Tensor:
    """The standard deviation, kept above zero so that z stays finite."""
    return variance.sqrt().clamp(min=torch.finfo(variance.dtype).tiny ** 0.5)


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


class Hinge(ExpectedLoss):
    """max(0, margin - y f) for labels -1 and 1 (or 0 and 1); margin 0 is the perceptron's loss.

    Example:
        Far from the kink the expectation is the loss itself, at the kink it is s phi(0):

        >>> mean, variance = torch.tensor([[3.0], [1.0]]), torch.tensor([[0.04], [0.04]])
        >>> Hinge().loss(mean, variance, torch.tensor([[-1.0], [1.0]]))
        tensor([4.0000, 0.0798])
    """

    name = "hinge"

    def __init__(self, margin: float = 1.0) -> None:
        if not (math.isfinite(margin) and margin >= 0):
            raise LikelihoodError("a margin of 0 or more", repr(margin), "use 1 for the hinge loss")
        self.margin = float(margin)

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return signs(outputs, targets, self.name)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self.margin - targets * outputs).clamp(min=0).sum(1)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        scale = _deviation(variance)
        z = (self.margin - targets * mean) / scale
        return (scale * (z * torch.special.ndtr(z) + _density(z))).sum(1)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return -targets * torch.special.ndtr((self.margin - targets * mean) / _deviation(variance))

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        scale = _deviation(variance)
        return _density((self.margin - targets * mean) / scale) / scale

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.special.ndtr(mean / _deviation(variance))

    def __repr__(self) -> str:
        return "Hinge()" if self.margin == 1 else f"Hinge(margin={self.margin})"


class ZeroOne(ExpectedLoss):
    """1 where y f <= 0, else 0, for labels -1 and 1 (or 0 and 1); not convex in the mean.

    Example:
        >>> mean, variance = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]])
        >>> ZeroOne().loss(mean, variance, torch.tensor([[1.0], [1.0]]))
        tensor([0.5000, 0.0228])
    """

    name = "zero_one"

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return signs(outputs, targets, self.name)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets * outputs <= 0).to(outputs.dtype).sum(1)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return torch.special.ndtr(-targets * mean / _deviation(variance)).sum(1)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        scale = _deviation(variance)
        return -targets * _density(mean / scale) / scale

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        scale = _deviation(variance)
        z = targets * mean / scale
        return z * _density(z) / scale**2

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.special.ndtr(mean / _deviation(variance))


class Quantile(ExpectedLoss):
    """The pinball loss max(tau (y - f), (tau - 1)(y - f)): its minimum is the tau-quantile.

    Args:
        level: tau, between 0 and 1.

    Example:
        >>> Quantile(0.9).residual(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
        tensor([[-0.4000]])
    """

    name = "quantile"

    def __init__(self, level: float) -> None:
        if not 0 < level < 1:
            raise LikelihoodError("a level between 0 and 1", repr(level), "use 0.5 for the median")
        self.level = float(level)

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return like_outputs(outputs, targets, self.name)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        above = targets - outputs
        return torch.maximum(self.level * above, (self.level - 1) * above).sum(1)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        scale = _deviation(variance)
        z = (mean - targets) / scale
        return (scale * (z * (torch.special.ndtr(z) - self.level) + _density(z))).sum(1)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return torch.special.ndtr((mean - targets) / _deviation(variance)) - self.level

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        scale = _deviation(variance)
        return _density((mean - targets) / scale) / scale

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    def __repr__(self) -> str:
        return f"Quantile({self.level})"


class Absolute(ExpectedLoss):
    """abs(y - f), twice the quantile loss of the median.

    Example:
        >>> Absolute().loss(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
        tensor([0.7979])
    """

    name = "absolute"
    _half = Quantile(0.5)

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return like_outputs(outputs, targets, self.name)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets - outputs).abs().sum(1)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return 2 * self._half.loss(mean, variance, targets)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return 2 * self._half.residual(mean, variance, targets)

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return 2 * self._half.curvature(mean, variance, targets)

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean
