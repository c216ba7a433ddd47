r"""``trajectory``: the difference of two trainings, with and without the example, along the record.

.. math::
    D \leftarrow e^{-k A} D + \frac{1 - e^{-k A}}{A} \frac{J' e}{N}, \qquad d = J D

over the segments of a recorded training, each with the curvature A and the gradients at a
checkpoint in its middle and its training time k. The residual e is that of the example's visits,
where they were recorded. d is read out at every checkpoint and at the end; the loss without the
example is the geometric mean of the losses at all readouts, with mean and spread of the last one:
the noise of the last steps, which no example is to blame for, is averaged out.

With full matrices the example's own curvature is taken out of A, and the loss is that at the end
(:mod:`engram.sensitivity.trajectory.full`). Kronecker factors hold little of it, and are scaled so
that the mean leverage is that of examples which the curvature has not seen
(:mod:`engram.sensitivity.trajectory.held_out`): A is that of the remaining data, with which e is
the residual as the training had it. Letting it follow d as well counts the own curvature twice.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engram.core.memory import available_bytes
from engram.core.progress import announce
from engram.core.state.model import device_of
from engram.engine.displacements import Displacements, entries_carried
from engram.engine.session import Observed as Batch
from engram.engine.session import Session
from engram.errors import ArgumentError
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import walk_is_affordable
from engram.sensitivity.estimators.base import (
    Estimate,
    Estimator,
    Observed,
    Setting,
    estimate_at,
    none_flagged,
)
from engram.sensitivity.trajectory.full import bytes_carried, full_stages, walked
from engram.sensitivity.trajectory.stages import Stage, residual_at_visits, stages
from engram.sensitivity.variance import DENSE_OUTPUTS
from engram.training.segments import NamedTraining

STAGES = 4  # checkpoints: more cost a pass each, and lower what is too large (docs/decisions.md)
STAGE_EPOCHS = 2  # of training that a checkpoint needs: with fewer, the walk costs more than it
SMALLEST = 1e-6  # loss that counts as one in a geometric mean: below, readouts are rounding
TOLD_FROM = 5000  # examples: with fewer the passes are over before the line is read
CARRIED_BYTES = 64 * 2**20  # of displacements that are held at a time
# Examples at a time where each is larger than that, and what of the free memory they may take: one
# by one the weights and bases would be read anew for every example
FEWEST_CARRIED, CARRIED_SHARE = 8, 0.1
CARRIED_COPIES = 3  # of a displacement: its own, the gradient absorbed last, and a temporary


def trajectory(observed: Observed, setting: Setting) -> Estimate:
    """d of every example of a batch, by the walk from the first checkpoint to the end."""
    assert isinstance(observed, Batch)
    if setting.full_walk:
        return _with_full_matrices(observed, setting)
    walk = setting.walk
    assert walk
    carried = Displacements(walk[0].bases)
    readouts = []
    for stage in walk:
        readouts.append(_through(stage, observed, carried))
    observed.trace.add_gradient(observed.residual, setting.posterior, setting.total)
    deviation = observed.trace.displaced(observed.residual, carried)
    estimate = estimate_at(observed, setting, deviation, none_flagged(observed))
    return replace(estimate, readouts=torch.stack([*readouts, estimate.loo_loss], dim=1))


def _through(stage: Stage, observed: Batch, carried: Displacements) -> Tensor:
    """The losses at a checkpoint without each example; D goes to the end of its segment."""
    seen = stage.driving.observe(observed.batch)
    residual = residual_at_visits(seen, stage.segment, stage.session.likelihood)
    moved = seen.trace.driving(residual, carried, stage.first_half)
    if stage.driving.views is not None:
        seen.trace.release()
        seen = stage.session.observe(observed.batch)
        moved = seen.trace.displaced(seen.residual, carried, stage.first_half)
    carried.advance(stage.whole)
    losses = stage.session.likelihood.loss(seen.outputs + moved, seen.targets).detach()
    seen.trace.release()
    return losses


def _with_full_matrices(observed: Batch, setting: Setting) -> Estimate:
    """Without the example's own curvature; what is at the end is the answer."""
    observed.trace.add_gradient(observed.residual, setting.posterior, setting.total)
    deviation = observed.trace.own_tangents(walked(setting.full_walk, observed))
    return estimate_at(observed, setting, deviation, none_flagged(observed))


def has_checkpoints(posterior: Posterior) -> bool:
    """Whether the training was recorded, with checkpoints on the way."""
    return posterior.training is not None and len(posterior.training.snapshots) > 1


def _prepared(setting: Setting) -> Setting:
    opened, training = setting.opened, setting.posterior.training
    assert opened is not None
    assert training is not None
    affordable = affordable_stages(training, opened.batches.num_data)
    return with_stages(setting, setting.segments or affordable)


def check_segments(count: int, estimator: str, posterior: Posterior) -> None:
    """ArgumentError unless so many segments can be gone along."""
    if estimator != ESTIMATOR.name:
        raise ArgumentError(
            f'segments= with estimator="{ESTIMATOR.name}", which goes along a recorded training',
            f'estimator="{estimator}"',
            "leave segments= out, or record the training: engram.record(optimizer, model)",
        )
    assert posterior.training is not None
    most = sum(snapshot.step > 0 for snapshot in posterior.training.snapshots)
    if count > most:
        raise ArgumentError(
            f"at most {most} segments: as many checkpoints were recorded",
            f"{count}",
            f"use segments={most}, or record more of them: engram.record(..., checkpoints={count})",
        )


def with_stages(setting: Setting, count: int) -> Setting:
    """A setting with so many stages of the recorded training, fewer where there are not so many."""
    opened, training = setting.opened, setting.posterior.training
    assert opened is not None
    assert training is not None
    announce(
        f"along {count} checkpoints of the training, a pass over "
        f'{opened.batches.num_data:,} examples at each and one at the end; estimator="linear" '
        "takes the last alone",
        opened.progress and opened.batches.num_data >= TOLD_FROM,
    )
    first = opened.batches.take(torch.zeros(1, dtype=torch.long))
    observed = opened.observe(first)
    outputs = observed.outputs.shape[1]
    if setting.posterior.is_dense and outputs <= DENSE_OUTPUTS and _takes_matrices(setting, opened):
        layout = setting.posterior.layout
        most = CARRIED_BYTES // bytes_carried(layout, observed.outputs)
        full_walk = full_stages(opened, training, layout, setting.segments or STAGES, seed=0)
        opened = replace(opened, largest_part=max(1, min(opened.largest_part, most)))
        return replace(setting, opened=opened, full_walk=full_walk)
    walk = stages(opened, training, count, seed=0)
    entries = entries_carried(observed.trace.sites, walk[0].bases)
    most = _examples_carried(max(1, entries * observed.outputs.element_size()), opened)
    opened = replace(opened, largest_part=max(1, min(opened.largest_part, most)))
    return replace(setting, opened=opened, walk=walk)


def _examples_carried(size: int, opened: Session) -> int:
    """How many examples go along at a time, by the bytes of one's displacement."""
    room = CARRIED_SHARE * available_bytes(device_of(opened.model)) / (CARRIED_COPIES * size)
    return max(CARRIED_BYTES // size, min(FEWEST_CARRIED, int(room)))


def _takes_matrices(setting: Setting, opened: Session) -> bool:
    """Of a last layer where that takes seconds; of all parameters as the posterior says."""
    return setting.posterior.only is None or walk_is_affordable(opened)


def affordable_stages(training: NamedTraining, num_data: int) -> int:
    """Checkpoints that are gone along: fewer for a training of a few epochs, where they are known.

    Args:
        training: whose visits tell how many epochs there were.
        num_data: examples of an epoch.
    """
    if training.visits is None or training.visits.is_empty:
        return STAGES
    epochs = float(training.visits.count.sum()) / num_data
    return min(STAGES, max(1, int(epochs / STAGE_EPOCHS)))


def level(readouts: Tensor) -> Tensor:
    """The geometric mean of each row of readouts [N, R], with mean and spread of the last column.

    It has less noise than the last column. But the losses of earlier columns are those of nets that
    had learned less, larger on easy examples and smaller on hard ones: so their logarithms get the
    standard deviation of the last column's, and the losses its mean. Where a loss is negative, as
    densities can have it, the same is done without logarithms.

    Example:
        >>> level(torch.tensor([[2.0, 4.0], [1.0, 1.0], [0.5, 0.25]]))
        tensor([4.0000, 1.0000, 0.2500])
    """
    signed = bool((readouts < 0).any())
    values = readouts if signed else readouts.clamp(min=SMALLEST).log()
    mean, last = values.mean(1), values[:, -1]
    fine = torch.isfinite(mean)
    own, wanted = (part[fine].std(correction=0) for part in (mean, last))
    spread = wanted / own if own > 0 else 1.0
    found = last[fine].mean() + (mean - mean[fine].mean()) * spread
    if signed:
        return found
    losses = found.exp()
    return losses * (readouts[fine, -1].mean() / losses[fine].mean())


ESTIMATOR = Estimator(
    "trajectory",
    trajectory,
    from_variance=False,
    fits=has_checkpoints,
    asks_for="a posterior with a recorded training and checkpoints",
    remedy="record the training with engram.record(optimizer, model), and pass it to "
    "engram.laplace(..., training=training)",
    prepare=_prepared,
    along_training=True,
)
