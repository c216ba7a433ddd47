r"""Any loss at all, averaged over Gaussian outputs by sampling.

No derivative of the loss is taken: with :math:`s = \sqrt{v}\, z` and z standard normal,

.. math:: e = \mathbb{E}\Big[\tfrac{\ell(m + s) - \ell(m - s)}{2} \tfrac{s}{v}\Big], \qquad
    \beta = \mathbb{E}\Big[\Big(\tfrac{\ell(m + s) + \ell(m - s)}{2} - \ell(m)\Big)
    \tfrac{s^2 - v}{v^2}\Big]

Each draw is paired with its mirror image, and the loss at the mean is the control variate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engram.core.errors import LikelihoodError, TargetError
from engram.likelihoods.expected.base import ExpectedLoss
from engram.likelihoods.expected.draws import check_samples, steps
from engram.likelihoods.loss_checks import LossFunction


class Sampled(ExpectedLoss):
    """A loss ``function(outputs [N, K], targets) -> [N]`` that need not have a derivative.

    Args:
        function: the loss, one number per example.
        num_samples: how many draws; the error falls a little faster than 1 / sqrt(num_samples).
        seed: of the draws, which are the same for every example and call.

    Example:
        >>> absolute = Sampled(lambda f, y: (f - y).abs()[:, 0], num_samples=4096)
        >>> zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        >>> abs(absolute.loss(zero, one, zero).item() - 0.7979) < 1e-3
        True
    """

    def __init__(self, function: LossFunction, num_samples: int = 1024, seed: int = 0) -> None:
        self.function = function
        self.num_samples = check_samples(num_samples)
        self.seed = seed
        self.name = getattr(function, "__name__", type(function).__name__)

    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        if len(targets) != len(mean):
            raise TargetError(
                f"{len(mean)} targets, one per example", str(len(targets)), "check the lengths"
            )
        if targets.is_floating_point():
            targets = targets.to(mean.dtype)
            if targets.dim() == 1 and mean.shape[1] == 1:
                targets = targets[:, None]
        loss = self.function(mean, targets)
        if not isinstance(loss, Tensor) or loss.shape != mean.shape[:1]:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise LikelihoodError(
                f"one loss per example, shape ({len(mean)},)",
                f"{shape} from {self.name!r}",
                "write the loss without mean or sum over examples",
            )
        return targets

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets).to(outputs.dtype)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean[:, 0])
        for step in self._steps(variance):
            total += (self._at(mean, step, targets) + self._at(mean, -step, targets)).sum(0)
        return total / self._count

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean)
        for step in self._steps(variance):
            odd = self._at(mean, step, targets) - self._at(mean, -step, targets)
            total += (odd[:, :, None] * step / variance).sum(0)
        return total / self._count

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean)
        centre = self.pointwise(mean, targets)
        for step in self._steps(variance):
            even = self._at(mean, step, targets) + self._at(mean, -step, targets) - 2 * centre
            total += (even[:, :, None] * (step**2 - variance) / variance**2).sum(0)
        return total / self._count

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self.loss(mean, variance, targets)

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    @property
    def _count(self) -> int:
        return 2 * (self.num_samples // 2)

    def _steps(self, variance: Tensor) -> Iterator[Tensor]:
        return steps(variance, self.num_samples, self.seed)

    def _at(self, mean: Tensor, step: Tensor, targets: Tensor) -> Tensor:
        """The loss at mean + step for a block of steps, [C, N]."""
        points = (mean + step).flatten(0, 1)
        repeated = targets.expand(len(step), *targets.shape).flatten(0, 1)
        return self.pointwise(points, repeated).reshape(step.shape[:2])

    def __repr__(self) -> str:
        return f"Sampled({self.name}, num_samples={self.num_samples}, seed={self.seed})"
