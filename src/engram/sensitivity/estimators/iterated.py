r"""``iterated``: the residual of the left-out prediction instead of the present one.

.. math:: d \leftarrow V e(f + d), \qquad \text{from } d = V e(f)

One backward and tangent pass a round, and no V. Its fixed point is exact for linear regression,
where it is that of ``corrected``; for softmax it is bounded, since residuals are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engram.sensitivity.estimators.base import Estimate, Estimator, Observed, Setting, estimate_at


def rounds_of(
    times_variance: Callable[[Tensor], Tensor],
    residual_at: Callable[[Tensor], Tensor],
    first: Tensor,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """d after some rounds, and where the rounds diverge: there d stays as it was before they did.

    Args:
        times_variance: V e for e [B, K].
        residual_at: e(f + d) for d [B, K].
        first: d = V e(f), [B, K].
        rounds: how many.

    Example:
        The residual of squared loss is e + d, so that d tends to V e / (1 - V):

        >>> first = torch.tensor([[0.5]], dtype=torch.float64)  # V = 1/2, e = 1
        >>> rounds_of(lambda e: 0.5 * e, lambda d: 1 + d, first, 50)[0]
        tensor([[1.0000]], dtype=torch.float64)
    """
    deviation, smallest = first, first.norm(dim=1)
    diverging = torch.zeros_like(smallest, dtype=torch.bool)
    for _ in range(rounds):
        moved = times_variance(residual_at(deviation))
        change = (moved - deviation).norm(dim=1)
        diverging = diverging | ~(change <= smallest)  # also true for NaN
        smallest = torch.where(diverging, smallest, change)
        deviation = torch.where(diverging[:, None], deviation, moved)
    return deviation, diverging


def iterated(observed: Observed, setting: Setting) -> Estimate:
    """d <- V e(f + d) for the rounds of the setting; flagged where they diverge."""

    def times_variance(residual: Tensor) -> Tensor:
        return observed.trace.deviation(residual, setting.posterior)

    def residual_at(deviation: Tensor) -> Tensor:
        moved = observed.outputs + deviation
        return setting.likelihood.residual(moved, observed.targets).detach()

    first = observed.trace.deviation(observed.residual, setting.posterior, setting.total)
    deviation, diverging = rounds_of(times_variance, residual_at, first, setting.rounds)
    return estimate_at(observed, setting, deviation, diverging)


ESTIMATOR = Estimator("iterated", iterated)
