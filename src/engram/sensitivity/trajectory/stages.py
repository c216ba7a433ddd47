"""The stages of a training: a model at each checkpoint, with the drift of its segment.

All stages share one eigenbasis for every block, so that displacements never have to be turned from
one into another; the curvature is each checkpoint's own (:mod:`.fitting`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engram.core.data.batches import call
from engram.core.parameters import Named
from engram.core.progress import progress_over
from engram.engine.drift import Drifts
from engram.engine.session import Observed, Session
from engram.engine.views import Augment, Views
from engram.likelihoods import Likelihood
from engram.sensitivity.trajectory.fitting import Bases, bases, fit, samples
from engram.training.segments import NamedTraining, Segment

STATISTICS_BATCHES = 8  # that BatchNorm's statistics are estimated from at a checkpoint
STATISTICS_BATCH = 128  # examples of each


@dataclass(frozen=True)
class Stage:
    """The model at a checkpoint, and what its segment does to displacements.

    Args:
        session: passes over the data with the weights of the checkpoint.
        driving: the same, with views of the examples where the training had such.
        segment: of the training, with the checkpoint in its middle.
        bases: of all drifts.
        first_half: the drift from the segment's start to its checkpoint.
        whole: over the whole segment.
        scale: that the factors' curvature was multiplied by.
    """

    session: Session
    driving: Session
    segment: Segment
    bases: Bases = field(repr=False)
    first_half: Drifts = field(repr=False)
    whole: Drifts = field(repr=False)
    scale: float = 1.0

    def filtered(self, vectors: Named) -> Named:
        """(1 - exp(-k A)) / (A N) v of the whole segment, for vectors by name, [..., *shape]."""
        return self._turned(vectors, {names: drift.gain for names, drift in self.whole.items()})

    def decayed(self, vectors: Named) -> Named:
        """exp(-k A) v of the whole segment."""
        return self._turned(vectors, {names: drift.decay for names, drift in self.whole.items()})

    def _turned(self, vectors: Named, factors: Mapping[tuple[str, ...], Tensor]) -> Named:
        found: Named = {}
        for block in self.bases.blocks:
            own = block.coordinates({name: vectors[name] for name in block.names})
            found |= block.from_coordinates(own * factors[block.names])
        return found


def stages(opened: Session, training: NamedTraining, count: int, seed: int) -> list[Stage]:
    """The stages of a recorded training.

    Args:
        opened: the model at the end of it, with the data.
        training: with checkpoints.
        count: of stages.
        seed: of the examples that the curvature is measured on, and of sampled labels.
    """
    segments = training.segments(count)
    sessions = [at_checkpoint(opened, s, training.augment, seed) for s in segments]
    fixed = {name for name, moved in training.moved.items() if not moved}
    measured = samples(sessions, fixed, seed)
    shared = bases(measured, fixed)
    found = []
    pairs = list(zip(segments, measured, strict=True))
    for segment, sample in progress_over(pairs, "curvature of the segments", opened.progress):
        drifts = fit(sample, segment, shared)
        plain, driving = replace(sample.session, views=None), sample.session
        own = (drifts.first_half, drifts.whole, drifts.scale)
        found.append(Stage(plain, driving, segment, shared, *own))
        sample.forget()
    return found


def at_checkpoint(opened: Session, segment: Segment, augment: Augment | None, seed: int) -> Session:
    """Passes of a copy of the model at the checkpoint in the middle of a segment.

    Args:
        opened: the model at the end of the training, with the data.
        segment: of the training.
        augment: what the training did to its inputs; every segment has views of its own.
        seed: of the views.
    """
    model = copy.deepcopy(opened.model)
    checkpoint = segment.middle
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in (checkpoint.weights | checkpoint.buffers).items():
            places[name].copy_(value)
    views = None if augment is None else Views(augment, hash((seed, segment.end)))
    session = replace(opened, engine=opened.engine.moved_to(model), views=views)
    estimate_statistics(session)
    return session


def residual_at_visits(seen: Observed, segment: Segment, likelihood: Likelihood) -> Tensor:
    """e at the checkpoint, or its mean over the example's visits in the segment.

    At a checkpoint an example that was just visited has a residual that is too small. Where the
    residual is prediction minus target, that of the visits is known from their mean prediction.
    """
    at_visits = segment.visits
    if at_visits is None:
        return seen.residual
    mean, counts = at_visits(seen.batch.indices.cpu())
    visited = (counts > 0).to(seen.outputs.device)[:, None]
    shift = mean.to(seen.outputs) - likelihood.mean(seen.outputs)
    return torch.where(visited, seen.residual + shift, seen.residual)


def estimate_statistics(session: Session) -> None:
    """Running statistics of batch normalisation at these weights, from some of the data.

    Those that training kept lag behind the weights: early in a training with a large learning rate
    the net in eval mode is another one than that which was trained.
    """
    norms = [
        module
        for module in session.model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    ]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
        norm.train()
    number = session.batches.num_data
    count = min(number, STATISTICS_BATCHES * STATISTICS_BATCH)
    spread = torch.linspace(0, number - 1, count).long()
    with torch.no_grad():
        for first in range(STATISTICS_BATCHES):
            some = spread[first::STATISTICS_BATCHES]
            if len(some) > 1:
                call(session.model, session.viewed(session.batches.take(some)).inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
