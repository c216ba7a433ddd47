"""Leaving a group out by walking the last part of its recorded training again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engram.core.data.batches import Batches, Data
from engram.core.data.columns import Columns
from engram.core.parameters import Named, trainable
from engram.core.selection import spread
from engram.core.state.model import outputs_at
from engram.engine.session import Session
from engram.sensitivity.effects import Effect
from engram.sensitivity.step_signals import SAMPLE, StepSignals, remaining
from engram.training.replay import Path

# Of the steps: from here on the training is walked again. Later is cheaper, and the group's mark in
# the weights fades less: from a third on, 0.57 to 0.79 of the true change of a group's own loss was
# left on CNNs, from two thirds on 0.36 to 0.64 (docs/results/groups.md)
START = 1 / 3


@dataclass(frozen=True)
class ReplayedGroup:
    """What a replay without a group has led to.

    Args:
        delta: change of the parameters, by name.
        group: effect on the group.
        evaluation: on other data.
        signals: of the remaining data.
        passes: over the data, forward and backward.
    """

    delta: Named
    group: Effect
    evaluation: Effect | None
    signals: StepSignals
    passes: float


def replayed_group(
    opened: Session, path: Path, chosen: Tensor, evaluate_on: Data | None
) -> ReplayedGroup:
    """The effect of a group on the model that its recorded training leads to without it."""
    start = path.checkpoint(int(START * path.training.num_steps))
    found = path.walked(start, chosen, progress=opened.progress)
    with torch.no_grad():
        before = trainable(opened.model)
        delta = {n: p - before[n] for n, p in trainable(found.model).items()}
    evaluation = None
    if evaluate_on is not None:
        other = Batches(evaluate_on, opened.batches.batch_size)
        evaluation = _effect(opened, found.model, other, torch.arange(other.num_data))
    rest = remaining(opened.batches, chosen)
    sample = rest[spread(len(rest), SAMPLE)] if len(rest) else rest
    change = _effect(opened, found.model, opened.batches, sample).change if len(rest) else 0.0
    return ReplayedGroup(
        delta,
        _effect(opened, found.model, opened.batches, chosen),
        evaluation,
        StepSignals(change),
        found.examples / opened.batches.num_data,
    )


def _effect(opened: Session, other: nn.Module, batches: Batches, indices: Tensor) -> Effect:
    """Of another model in the place of the present one, its buffers included."""
    columns = Columns(len(indices))
    likelihood, source = opened.likelihood, batches.subset(indices)
    length = -(-len(indices) // batches.batch_size)
    for batch in opened.parts(source, "effect", length):
        observed = opened.observe(batch)
        without = outputs_at(other, {}, observed.batch)
        columns.add(
            {
                "indices": observed.batch.indices,
                "outputs": observed.outputs,
                "outputs_without": without,
                "loss": observed.loss,
                "loss_without": likelihood.loss(without, observed.targets).detach(),
            }
        )
        observed.trace.release()
    return Effect(**columns.complete(), likelihood=opened.likelihood)
