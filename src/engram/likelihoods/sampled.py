r"""Any loss at all, averaged over Gaussian outputs by sampling.

No derivative of the loss is taken: with :math:`s = \sqrt{v}\, z` and z standard normal,

.. math:: e = \mathbb{E}\Big[\tfrac{\ell(m + s) - \ell(m - s)}{2} \tfrac{s}{v}\Big], \qquad
    \beta = \mathbb{E}\Big[\Big(\tfrac{\ell(m + s) + \ell(m - s)}{2} - \ell(m)\Big)
    \tfrac{s^2 - v}{v^2}\Big]

Each draw is paired with its mirror image, and the loss at the mean is the control variate.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from numbers import Integral

import torch
from torch import Tensor

from engram.errors import LikelihoodError, TargetError
from engram.likelihoods.base import ExpectedLoss, LossFunction

NUM_SAMPLES = 1024  # draws; the error falls a little faster than one over the root of their number
FEWEST = 16  # samples that an average over pairs needs to mean anything
AT_ONCE = 2**18  # numbers in a block of draws for all examples: 2 MB in double precision


def check_samples(num_samples: int) -> int:
    """At least as many as an average over pairs needs to mean anything."""
    if not (isinstance(num_samples, Integral) and num_samples >= FEWEST):
        raise LikelihoodError(f"at least {FEWEST} samples", repr(num_samples), "use 256 or more")
    return int(num_samples)


def normal_draws(num_samples: int, dimension: int, seed: int, like: Tensor) -> Tensor:
    """Half of the draws, [num_samples / 2, dimension]; the other half is minus these.

    A scrambled Sobol sequence through the normal quantile, which covers the space evenly. The
    sequence has a generator of its own, so that the caller's random state does not move.
    """
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed)
    uniform = engine.draw(num_samples // 2, dtype=torch.float64)
    margin = torch.finfo(torch.float64).eps
    return torch.special.ndtri(uniform.clamp(margin, 1 - margin)).to(like)


class DrawnAverage(ExpectedLoss, ABC):
    """An average over mirrored draws.

    Args:
        num_samples: how many draws.
        seed: of the draws, which are the same for every example and call.
    """

    def __init__(self, num_samples: int = NUM_SAMPLES, seed: int = 0) -> None:
        self.num_samples, self.seed = check_samples(num_samples), seed

    @property
    def count(self) -> int:
        """Draws with their mirror images."""
        return 2 * (self.num_samples // 2)

    def steps(self, variance: Tensor) -> Iterator[Tensor]:
        """The draws scaled to the outputs of every example, in blocks [C, N, K]."""
        draws = normal_draws(self.num_samples, variance.shape[1], self.seed, variance)
        scale = variance.sqrt()
        for block in draws.split(max(1, AT_ONCE // max(1, variance.numel()))):
            yield scale * block[:, None, :]


class Sampled(DrawnAverage):
    """A loss ``function(outputs [N, K], targets) -> [N]`` that need not have a derivative.

    Args:
        function: the loss, one number per example.
        num_samples, seed: of the draws.

    Example:
        >>> absolute = Sampled(lambda f, y: (f - y).abs()[:, 0], num_samples=4096)
        >>> zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        >>> abs(absolute.loss(zero, one, zero).item() - 0.7979) < 1e-3
        True
    """

    def __init__(
        self, function: LossFunction, num_samples: int = NUM_SAMPLES, seed: int = 0
    ) -> None:
        super().__init__(num_samples, seed)
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets) != len(outputs):
            raise TargetError(
                f"{len(outputs)} targets, one per example", str(len(targets)), "check the lengths"
            )
        if targets.is_floating_point():
            targets = targets.to(outputs.dtype)
            if targets.dim() == 1 and outputs.shape[1] == 1:
                targets = targets[:, None]
        loss = self.function(outputs, targets)
        if not isinstance(loss, Tensor) or loss.shape != outputs.shape[:1]:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise LikelihoodError(
                f"one loss per example, shape ({len(outputs)},)",
                f"{shape} from {self.name!r}",
                "write the loss without mean or sum over examples",
            )
        return targets

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets).to(outputs.dtype)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean[:, 0])
        for step in self.steps(variance):
            total += (self._at(mean, step, targets) + self._at(mean, -step, targets)).sum(0)
        return total / self.count

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean)
        for step in self.steps(variance):
            odd = self._at(mean, step, targets) - self._at(mean, -step, targets)
            total += (odd[:, :, None] * step / variance).sum(0)
        return total / self.count

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean)
        centre = self.pointwise(mean, targets)
        for step in self.steps(variance):
            even = self._at(mean, step, targets) + self._at(mean, -step, targets) - 2 * centre
            total += (even[:, :, None] * (step**2 - variance) / variance**2).sum(0)
        return total / self.count

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    def _at(self, mean: Tensor, step: Tensor, targets: Tensor) -> Tensor:
        """The loss at mean + step for a block of steps, [C, N]."""
        points = (mean + step).flatten(0, 1)
        repeated = targets.expand(len(step), *targets.shape).flatten(0, 1)
        return self.pointwise(points, repeated).reshape(step.shape[:2])

    def __repr__(self) -> str:
        return f"Sampled({self.name}, num_samples={self.num_samples}, seed={self.seed})"
