r"""Softmax over K latent outputs, or over a linear mixture of them, averaged by sampling.

The derivatives of the loss stand under the expectation; with logits :math:`W f` and
:math:`p = \mathrm{softmax}(W f)`

.. math:: e = \mathbb{E}[W'(p - y)], \qquad
    \beta = \mathrm{diag}\,\mathbb{E}[W'(\mathrm{diag}(p) - p p') W]
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engram.core.errors import TargetError
from engram.likelihoods.expected.base import ExpectedLoss
from engram.likelihoods.expected.draws import check_samples, steps


class Softmax(ExpectedLoss):
    """-log softmax(W f)_y for class numbers y.

    Args:
        mixing: W, [classes, outputs]; the identity if not given.
        num_samples: how many draws.
        seed: of the draws, which are the same for every example and call.

    Example:
        >>> f = torch.zeros(1, 4)
        >>> Softmax().residual(f, torch.full_like(f, 1e-12), torch.tensor([2]))
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """

    name = "softmax"

    def __init__(
        self, mixing: Tensor | None = None, num_samples: int = 1024, seed: int = 0
    ) -> None:
        self.mixing = mixing
        self.num_samples = check_samples(num_samples)
        self.seed = seed

    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        num_outputs = mean.shape[1]
        if self.mixing is not None and self.mixing.shape[1] != num_outputs:
            raise TargetError(
                f"{self.mixing.shape[1]} latent outputs, as the mixing weights have",
                f"{num_outputs}",
                "give the model as many latent functions",
            )
        classes = num_outputs if self.mixing is None else len(self.mixing)
        if targets.is_floating_point() or targets.shape != (len(mean),) or classes < 2:
            raise TargetError(
                f"{len(mean)} integer class numbers and at least 2 classes",
                f"{targets.dtype} of shape {tuple(targets.shape)} and {classes} classes",
                "give class numbers as int64",
            )
        if ((targets < 0) | (targets >= classes)).any():
            raise TargetError(
                f"class numbers from 0 to {classes - 1}",
                f"values from {int(targets.min())} to {int(targets.max())}",
                "renumber the classes",
            )
        return targets.long()

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._at(outputs[None], targets)[0]

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        blocks = [self._at(points, targets) for points in self._points(mean, variance)]
        return torch.cat(blocks).mean(0)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        probability = self.prediction(mean, variance)
        hot = torch.zeros_like(probability).scatter_(1, targets[:, None], 1.0)
        return self._mixed(probability - hot)

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean)
        for points in self._points(mean, variance):
            probability = self._logits(points).softmax(-1)
            square = probability if self.mixing is None else probability @ self.mixing**2
            total += (square - self._mixed(probability) ** 2).sum(0)
        return total / self._count

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        blocks = [self._at(points, targets) for points in self._points(mean, variance)]
        return math.log(self._count) - torch.logsumexp(-torch.cat(blocks), 0)

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        total = torch.zeros_like(self._logits(mean))
        for points in self._points(mean, variance):
            total += self._logits(points).softmax(-1).sum(0)
        return total / self._count

    @property
    def _count(self) -> int:
        return 2 * (self.num_samples // 2)

    def _at(self, points: Tensor, targets: Tensor) -> Tensor:
        """The loss at a block of points [C, N, K], [C, N]."""
        chosen = targets[None, :, None].expand(len(points), -1, 1)
        return -self._logits(points).log_softmax(-1).gather(2, chosen)[:, :, 0]

    def _logits(self, outputs: Tensor) -> Tensor:
        return outputs if self.mixing is None else outputs @ self.mixing.T

    def _mixed(self, vector: Tensor) -> Tensor:
        return vector if self.mixing is None else vector @ self.mixing

    def _points(self, mean: Tensor, variance: Tensor) -> Iterator[Tensor]:
        for step in steps(variance, self.num_samples, self.seed):
            yield torch.cat([mean + step, mean - step])

    def __repr__(self) -> str:
        return f"Softmax(num_samples={self.num_samples}, seed={self.seed})"
