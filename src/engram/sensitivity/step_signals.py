r"""What tells whether the step for a group may be believed, without training again.

With the objective of the remaining data R and the step d from the gradient g of the group, a step
that is right hardly raises the loss of the remaining data; the group has less curvature along it
than all data; and R falls about as far as the quadratic model says,

.. math:: \frac{R(\theta + d) - R(\theta) - \nabla L' d}{-\frac12 g' d} \approx 1

where :math:`\nabla L' d` is what further training of the whole model would bring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.data.batches import Batches
from engram.core.dtypes import wide
from engram.core.parameters import Named, inner, trainable
from engram.core.selection import spread
from engram.core.state.model import outputs_at
from engram.engine.session import Session
from engram.posteriors.gaussian import Posterior

# On CNNs with BatchNorm training again raises the loss of the remaining data by 0.015 at most, in
# most cases lowers it; steps that were wrong in sign or by more than a factor 2 raised it by 0.035
# to 300 (docs/results/groups.md)
LARGEST_RISE = 0.03  # nats per remaining example
LARGEST_LEVERAGE = 0.5  # along the step; sources at 0.7 came out at 0.06 to 0.5 of the truth
SAMPLE = 1024  # examples of each part that are looked at: the mean of more hardly differs


@dataclass(frozen=True)
class StepSignals:
    """Signals of a removal.

    Attributes:
        remaining_change: of the mean loss of the remaining data, without the group minus with it.
        leverage: curvature of the group over that of the posterior, along the step; None for a
            replay.
        agreement: actual over predicted decrease of the remaining data's objective; None for a
            replay.
    """

    remaining_change: float
    leverage: float | None = None
    agreement: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether one of them says that the removal is not to be believed; NaN does."""
        good = self.remaining_change <= LARGEST_RISE
        good &= self.leverage is None or self.leverage <= LARGEST_LEVERAGE
        good &= self.agreement is None or self.agreement >= 0
        return not good


@dataclass(frozen=True)
class _Along:
    """Sums over some examples along a step: loss, e' J d and (J d)' Lambda (J d)."""

    change: float
    slope: float
    curvature: float


def step_signals(
    opened: Session, posterior: Posterior, chosen: Tensor, weights: Tensor, delta: Named
) -> StepSignals:
    """Signals of a step for a group, given as indices and weights [M]."""
    rest = remaining(opened.batches, chosen)
    own = _along(opened, chosen, weights, delta)
    if not len(rest):
        return StepSignals(0.0)
    others = _along(opened, rest, torch.ones(len(rest)), delta)
    known = {name: delta[name] for name in posterior.names}
    layout = posterior.layout
    flat = wide(layout.flatten(known))
    pulled = float((posterior.prior_vector.to(flat) * flat.square()).sum())
    if posterior.training is not None:
        pulled += sum(
            float((wide(v).square() / wide(posterior.training.time[n])).sum()) * posterior.num_data
            for n, v in known.items()
        )
    actual = others.change - (others.slope + own.slope) + pulled / 2
    return StepSignals(
        others.change / len(rest),
        own.curvature / max(inner(known, posterior.multiply(known)), 1e-300),
        actual / min(-own.slope / 2, -1e-300),
    )


def remaining(batches: Batches, chosen: Tensor) -> Tensor:
    """Positions of all examples that are not in a group."""
    kept = torch.ones(batches.num_data, dtype=torch.bool)
    kept[chosen] = False
    return kept.nonzero()[:, 0]


def _along(opened: Session, indices: Tensor, weights: Tensor, delta: Named) -> _Along:
    """Sums over all, from a sample that is spread over them."""
    places = spread(len(indices), SAMPLE)
    scale = len(indices) / len(places)
    weight_of = dict(zip(indices[places].tolist(), weights[places].tolist(), strict=True))
    moved = {n: p.detach() + delta[n] for n, p in trainable(opened.model).items() if n in delta}
    sums = torch.zeros(3, dtype=torch.float64)
    for observed in opened.passes("signals", indices[places]):
        share = [weight_of[int(i)] for i in observed.batch.indices]
        weight = torch.tensor(share, dtype=torch.float64)
        likelihood, targets = opened.likelihood, observed.targets
        tangent = observed.trace.tangent(delta)
        after = likelihood.loss(outputs_at(opened.model, moved, observed.batch), targets)
        curved = likelihood.hessian_times(observed.outputs, targets, tangent)
        parts = (
            after - observed.loss,
            (observed.residual * tangent).sum(1),
            (curved * tangent).sum(1),
        )
        sums += torch.stack([(weight * part.detach().double().cpu()).sum() for part in parts])
    return _Along(*(scale * sums).tolist())
