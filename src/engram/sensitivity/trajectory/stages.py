r"""The stages of a training: a model at each checkpoint, with the drift of its segment.

All stages share one eigenbasis for every block, so that displacements never have to be turned from
one into another. It comes from the Kronecker factors of all checkpoints together; the eigenvalues
are each checkpoint's own: the mean squared gradients there, in that basis (as in EK-FAC), times the
factor that gives them the leverage of all layers together (:mod:`.held_out`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engram.core.data.batches import call
from engram.core.dtypes import wide
from engram.core.parameters import Named
from engram.curvature.kfac import KroneckerFactors
from engram.curvature.kinds import ggn_roots
from engram.curvature.moments import SquareMoments
from engram.engine.displacements import Drift, Drifts
from engram.engine.dropout import dropping
from engram.engine.session import Observed, Session
from engram.likelihoods import Likelihood
from engram.linalg.block import MatrixBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.precision import Precision
from engram.sensitivity.trajectory.held_out import (
    FEWEST_HELD,
    HELD_OUT,
    Gradients,
    curvature_scale,
    examples_held,
    gram_of,
    held_out_leverage,
)
from engram.training.segments import NamedTraining, Segment

BlockNames = tuple[str, ...]

FIT_PASSES = 1.0  # over the data, all checkpoints together, that curvature is measured with, twice
FEWEST_EXAMPLES = 500  # at each checkpoint, where there are so many: fewer make noisy eigenvalues
EXACT_GRADIENTS = 1000  # of all outputs at a checkpoint, up to which no labels are sampled
FIXED_PRIOR = 1.0  # of factors that only give a basis: any positive number
SHORTEST = 1e-12  # training time of an entry: one that never had a step moves nowhere
STATISTICS_BATCHES = 8  # that BatchNorm's statistics are estimated from at a checkpoint
STATISTICS_BATCH = 128  # examples of each


@dataclass(frozen=True)
class Bases(Precision):
    """Blocks whose eigenbases all stages share.

    Args:
        blocks: of the parameters that training moves.
        counts: how often each row of an embedding was picked, by its name.
    """

    blocks: tuple[MatrixBlock, ...]
    counts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """The model at a checkpoint, and what its segment does to displacements.

    Args:
        session: passes over the data with the weights of the checkpoint.
        segment: of the training, with the checkpoint in its middle.
        bases: of all drifts.
        first_half: the drift from the segment's start to its checkpoint.
        whole: over the whole segment.
        scale: that the factors' curvature was multiplied by.
    """

    session: Session
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
    sessions = [at_checkpoint(opened, segment) for segment in segments]
    parts = _parts(opened, len(segments), seed)
    fixed = {name for name, moved in training.moved.items() if not moved}
    bases = _bases(sessions, parts, fixed, seed)
    return [
        _stage(session, segment, bases, part, seed)
        for session, segment, part in zip(sessions, segments, parts, strict=True)
    ]


def at_checkpoint(opened: Session, segment: Segment) -> Session:
    """Passes of a copy of the model at the checkpoint in the middle of a segment."""
    model = copy.deepcopy(opened.model)
    checkpoint = segment.middle
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in (checkpoint.weights | checkpoint.buffers).items():
            places[name].copy_(value)
    session = replace(opened, engine=opened.engine.moved_to(model))
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
                call(session.model, session.placed(session.batches.take(some)).inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def _parts(opened: Session, count: int, seed: int) -> list[Tensor]:
    """Examples for each checkpoint, others for each as long as there are enough."""
    number = opened.batches.num_data
    size = min(number, max(FEWEST_EXAMPLES, int(FIT_PASSES * number / count)))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(number, generator=generator)
    repeated = order.repeat(-(-count * size // number))
    return [repeated[size * k : size * (k + 1)].sort().values for k in range(count)]


def _observed(
    session: Session, part: Tensor, seed: int, of: int | None = None
) -> Iterator[Gradients]:
    """Batches with the gradients of the roots of the Gauss-Newton matrix, or of sampled labels.

    The whole matrix takes a backward pass for every output, and with many examples makes no
    difference that could be measured (docs/decisions.md).

    Args:
        session: at a checkpoint.
        part: examples.
        seed: of sampled labels.
        of: how many examples there are in all, where they are asked for in parts.
    """
    count = len(part) if of is None else of
    with dropping(session.model, seed):
        for observed in session.passes("curvature along the training", part):
            few = count * observed.outputs.shape[1] <= EXACT_GRADIENTS
            roots = ggn_roots(observed, session.likelihood, "ggn" if few else "fisher", seed)
            with torch.no_grad():
                gradients = [
                    observed.trace.arranged(roots[:, :, r].contiguous())
                    for r in range(roots.shape[2])
                ]
            yield observed, gradients


def _bases(
    sessions: Sequence[Session], parts: Sequence[Tensor], fixed: set[str], seed: int
) -> Bases:
    """Eigenbases of Kronecker factors from all checkpoints together; other weights have none."""
    parameters = sessions[-1].engine.parameters
    factors = KroneckerFactors(fixed)
    for session, part in zip(sessions, parts, strict=True):
        for observed, gradients in _observed(session, part, seed):
            factors.update_columns(observed.trace)
            for one in gradients:
                factors.update_rows(observed.trace, one)
    factors.drop_unused()
    dtype = next(iter(parameters.values())).dtype
    blocks: list[MatrixBlock] = [f.block(FIXED_PRIOR, dtype) for f in factors.layers.values()]
    covered = {name for block in blocks for name in block.names} | fixed
    rest = {n: p.detach() for n, p in parameters.items() if n not in covered}
    blocks += [DiagonalBlock.of(name, torch.ones_like(p)) for name, p in rest.items()]
    counts = {n: f.counts for n, f in factors.layers.items() if f.counts is not None}
    return Bases(tuple(blocks), counts)


def _stage(session: Session, segment: Segment, bases: Bases, part: Tensor, seed: int) -> Stage:
    number, dtype = session.batches.num_data, next(session.model.parameters()).dtype
    squares = SquareMoments(bases.blocks)
    for _ in _added(squares, _observed(session, part, seed)):
        pass
    curvatures, rates, priors = {}, {}, {}
    for block in bases.blocks:
        own = wide(squares.of_block(block)) / len(part)
        if block.names[0] in bases.counts:
            own = _by_tokens(own, bases.counts[block.names[0]], len(part) / number)
        curvatures[block.names] = own
        rates[block.names], priors[block.names] = _rates(segment, block)
    scale = _scale(session, segment, bases, curvatures, part, seed)

    def over(share: float) -> Drifts:
        return {
            names: Drift.over(share / rates[names], scale * curvature + priors[names], number).to(
                dtype
            )
            for names, curvature in curvatures.items()
        }

    return Stage(session, segment, bases, over(0.5), over(1.0), scale)


def _added(moments: SquareMoments, observed: Iterable[Gradients]) -> Iterator[Gradients]:
    """The same batches, their squared gradients added up on the way."""
    names = set(moments.block_of)
    for batch, gradients in observed:
        for one in gradients:
            moments.update(batch.trace, one, names)
        yield batch, gradients


def _scale(
    session: Session,
    segment: Segment,
    bases: Bases,
    curvatures: Mapping[BlockNames, Tensor],
    part: Tensor,
    seed: int,
) -> float:
    """The factor of the curvature with which the mean leverage is that of all layers together.

    1 where the gradients of too few examples fit into memory.
    """
    parameters, number = session.engine.parameters, session.batches.num_data
    times = {
        name: segment.time[name].clamp(min=SHORTEST).expand(parameters[name].shape)
        for name in bases.block_of
    }
    count = min(examples_held(sum(time.numel() for time in times.values())), len(part))
    if count < FEWEST_HELD:
        return 1.0
    out = count // HELD_OUT
    order = part[torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:count]]
    seen, held = order[out:].sort().values, order[:out].sort().values
    squares = SquareMoments(bases.blocks)
    batches = itertools.chain(
        _observed(session, seen, seed, count),
        _added(squares, _observed(session, held, seed, count)),
    )
    wanted = held_out_leverage(gram_of(batches, times), out, number, seed)
    energies, rates = [], []
    for block in bases.blocks:
        rate, _ = _rates(segment, block)
        energies.append((wide(squares.of_block(block)) / out / rate).flatten())
        rates.append((curvatures[block.names] / rate).flatten())
    return curvature_scale(torch.cat(rates), torch.cat(energies), wanted)


def _by_tokens(squares: Tensor, counts: Tensor, share: float) -> Tensor:
    """Squares of an embedding by how often its tokens come, none less often than once.

    The examples that curvature is measured on have few of the rare tokens: measured row by row,
    these would have no curvature at all, and an example that has one would move it without end.
    """
    shares = wide(counts) / counts.sum().clamp(min=1)
    once = shares[shares > 0].min() * share if bool((shares > 0).any()) else 1.0
    return shares.clamp(min=once)[None, :, None] * squares.sum(1, keepdim=True)


def _rates(segment: Segment, block: MatrixBlock) -> tuple[Tensor, Tensor]:
    """1 / k and the weight decay W / C of a segment, in the eigenbasis of a block."""
    layout = block.layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    times = {n: wide(segment.time[n]).clamp(min=SHORTEST) for n in shapes}
    spent = {n: times[n].expand(shape) for n, shape in shapes.items()}
    decay = {n: wide(segment.decay[n]).expand(s) / spent[n] for n, s in shapes.items()}
    return block.projected({n: t.reciprocal() for n, t in spent.items()}), block.projected(decay)
