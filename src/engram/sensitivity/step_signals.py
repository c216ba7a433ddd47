r"""What tells whether the step for a group may be believed, without training again.

With the objective of the remaining data R and the step d from the gradient g of the group, a step
that is right hardly raises the loss of the remaining data; the group has less curvature along it
than all data; and R falls about as far as the quadratic model says,

.. math:: \frac{R(\theta + d) - R(\theta) - \nabla L' d}{-\frac12 g' d} \approx 1

where :math:`\nabla L' d` is what further training of the whole model would bring.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from engram.sensitivity.group import Part

SAMPLE = 1024  # examples of each part that are looked at: the mean of more hardly differs
SURE = 2  # standard errors of a slope that are taken off it


@dataclass(frozen=True)
class StepSignals:
    """Signals of a removal.

    Attributes:
        remaining_change: of the mean loss of the remaining data, without the group minus with it.
        leverage: curvature of the group over that of the posterior, along the step; None for a
            replay.
        agreement: actual over predicted decrease of the remaining data's objective; None for a
            replay.
        drift: slope of the whole objective along the step over that of the group's loss, as far
            as it is surely there; 0 at a minimum. None for a replay, and where weights are not 1.
        second_step: of a generalised linear model, what a second Newton step, taken where the first
            led, changes of the group's effect, over that effect; None for others.
    """

    remaining_change: float
    leverage: float | None = None
    agreement: float | None = None
    drift: float | None = None
    second_step: float | None = None


@dataclass(frozen=True)
class _Along:
    """Sums over some examples along a step: loss, e' J d and (J d)' Lambda (J d).

    The standard error of the slope is that of a sample that stands for all.
    """

    change: float
    slope: float
    curvature: float
    slope_error: float


_NOTHING = _Along(0.0, 0.0, 0.0, 0.0)


def step_signals(
    opened: Session, posterior: Posterior, parts: Sequence[Part], delta: Named
) -> StepSignals:
    """Signals of a step for a group of the training data, or of others that are put in."""
    taken = [part for part in parts if part.opened is opened]
    chosen = torch.cat([torch.zeros(0, dtype=torch.long), *(part.chosen for part in taken)])
    rest = remaining(opened.batches, chosen)
    own = _summed([_along(part, part.weights, delta) for part in parts])
    if not len(rest):
        return StepSignals(0.0)
    others = _along(Part(opened, rest, torch.ones(len(rest))), torch.ones(len(rest)), delta)
    known = {name: delta[name] for name in posterior.names}
    layout = posterior.layout
    flat = wide(layout.flatten(known))
    pulled = float((posterior.prior_vector.to(flat) * flat.square()).sum())
    if posterior.training is not None:
        pulled += sum(
            float((wide(v).square() / wide(posterior.training.time[n])).sum()) * posterior.num_data
            for n, v in known.items()
        )
    whole = len(taken) == len(parts) and all(bool((part.weights == 1).all()) for part in parts)
    left = _NOTHING if whole else _left(opened, parts, delta)
    slope = others.slope + left.slope + own.slope  # of all data: what is left in, and what is not
    actual = others.change + left.change - slope + pulled / 2
    return StepSignals(
        others.change / len(rest),
        own.curvature / max(inner(known, posterior.multiply(known)), 1e-300),
        actual / min(-own.slope / 2, -1e-300),
        _drift(posterior, own, others, flat) if whole else None,
    )


def _left(opened: Session, parts: Sequence[Part], delta: Named) -> _Along:
    """What is left in of the group's examples, and those that are put in."""
    shares = [
        (part, (1.0 if part.opened is opened else 0.0) - part.weights.double()) for part in parts
    ]
    return _summed([_along(part, share, delta) for part, share in shares if share.any()])


def _summed(found: Sequence[_Along]) -> _Along:
    total = _NOTHING
    for one in found:
        error = (total.slope_error**2 + one.slope_error**2) ** 0.5
        total = _Along(
            total.change + one.change,
            total.slope + one.slope,
            total.curvature + one.curvature,
            error,
        )
    return total


def _drift(posterior: Posterior, own: _Along, others: _Along, flat: Tensor) -> float:
    """|grad L' d| over g' d, less what a sample may be off by."""
    mean = wide(posterior.layout.flatten({n: posterior.mean[n] for n in posterior.names}))
    pull = float((posterior.prior_vector.to(flat) * mean.to(flat) * flat).sum())
    error = SURE * (own.slope_error**2 + others.slope_error**2) ** 0.5
    return max(abs(own.slope + others.slope + pull) - error, 0.0) / max(abs(own.slope), 1e-300)


def remaining(batches: Batches, chosen: Tensor) -> Tensor:
    """Positions of all examples that are not in a group."""
    kept = torch.ones(batches.num_data, dtype=torch.bool)
    kept[chosen] = False
    return kept.nonzero()[:, 0]


def _along(part: Part, weights: Tensor, delta: Named) -> _Along:
    """Sums over all examples of a part with weights [M], from a sample that is spread over them."""
    opened, indices = part.opened, part.chosen
    places = spread(len(indices), SAMPLE)
    scale = len(indices) / len(places)
    weight_of = dict(zip(indices[places].tolist(), weights[places].tolist(), strict=True))
    moved = {n: p.detach() + delta[n] for n, p in trainable(opened.model).items() if n in delta}
    columns: list[Tensor] = []
    for observed in opened.passes("signals", opened.own_rows(indices[places])):
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
        columns.append(torch.stack([weight * part.detach().double().cpu() for part in parts], 1))
    own = {"along": torch.cat(columns)} if columns else {}
    along = opened.peers.joined("signals", own)["along"]
    error = _error_of_sum(along[:, 1], len(indices))
    change, slope, curvature = (scale * along.sum(0)).tolist()
    return _Along(change, slope, curvature, error)


def _error_of_sum(sample: Tensor, count: int) -> float:
    """Standard error of the sum over ``count`` examples from a sample of them, without return."""
    if len(sample) == count:
        return 0.0
    return count * float(sample.std()) * ((1 / len(sample)) * (1 - len(sample) / count)) ** 0.5
