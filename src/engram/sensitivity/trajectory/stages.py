r"""The stages of a training: a model at each checkpoint, with the drift of its segment.

All stages share one eigenbasis for every block, so that displacements never have to be turned from
one into another. It comes from the Kronecker factors of all checkpoints together; the eigenvalues
are each checkpoint's own: the mean squared gradients there, in that basis (as in EK-FAC).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engram.core.data.batches import call
from engram.core.dtypes import eigh, wide
from engram.core.parameters import Layout, Named
from engram.curvature.kfac import KroneckerFactors
from engram.curvature.kinds import ggn_roots
from engram.curvature.moments import OuterMoments, SquareMoments
from engram.engine.displacements import Drift, Drifts
from engram.engine.dropout import dropping
from engram.engine.session import Observed, Session
from engram.likelihoods import Likelihood
from engram.linalg.block import MatrixBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.linalg.precision import Precision
from engram.training.segments import NamedTraining, Segment

FIT_PASSES = 1.0  # over the data, all checkpoints together, that curvature is measured with, twice
FEWEST_EXAMPLES = 500  # at each checkpoint, where there are so many: fewer make noisy eigenvalues
EXACT_GRADIENTS = 5000  # of all outputs at a checkpoint, up to which no labels are sampled
LARGEST_MATRIX = 1500  # entries of a weight whose own matrix is taken: a second each
FIXED_PRIOR = 1.0  # of factors that only give a basis: any positive number
SHORTEST = 1e-12  # training time of an entry: one that never had a step moves nowhere
STATISTICS_BATCHES = 20  # that BatchNorm's statistics are estimated from, where none were recorded


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
    """

    session: Session
    segment: Segment
    bases: Bases = field(repr=False)
    first_half: Drifts = field(repr=False)
    whole: Drifts = field(repr=False)

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
    if not checkpoint.has_buffers:
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
    """Running statistics of batch normalisation at these weights, from some of the data."""
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
    with torch.no_grad():
        for number, batch in enumerate(session.batches):
            if number == STATISTICS_BATCHES:
                break
            call(session.model, session.placed(batch).inputs)
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
    session: Session, part: Tensor, seed: int
) -> Iterator[tuple[Observed, list[list[Tensor | None]]]]:
    """Batches with the gradients of the roots of the Gauss-Newton matrix, or of sampled labels.

    The whole matrix takes a backward pass for every output, and with many examples makes no
    difference that could be measured (docs/decisions.md).
    """
    with dropping(session.model, seed):
        for observed in session.passes("curvature along the training", part):
            few = len(part) * observed.outputs.shape[1] <= EXACT_GRADIENTS
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
    """Eigenbases from all checkpoints together.

    Small weights that act at many positions have the eigenvectors of their own Gauss-Newton matrix,
    where Kronecker factors are furthest from it; others those of their factors; the rest none.
    """
    parameters = sessions[-1].engine.parameters
    factors, whole = KroneckerFactors(fixed), dict[str, OuterMoments]()
    for session, part in zip(sessions, parts, strict=True):
        for observed, gradients in _observed(session, part, seed):
            whole = whole or _whole_matrices(observed, fixed)
            factors.update_columns(observed.trace)
            for moments in whole.values():
                moments.update(observed.trace, gradients)
            for one in gradients:
                factors.update_rows(observed.trace, one)
    factors.drop_unused()
    blocks: list[MatrixBlock] = [_whole_block(m, parameters) for m in whole.values()]
    dtype = next(iter(parameters.values())).dtype
    for factor in factors.layers.values():
        if not whole.keys() & set(factor.layout.names):
            blocks.append(factor.block(FIXED_PRIOR, dtype))
    covered = {name for block in blocks for name in block.names} | fixed
    rest = {n: p.detach() for n, p in parameters.items() if n not in covered}
    blocks += [DiagonalBlock.of(name, torch.ones_like(p)) for name, p in rest.items()]
    counts = {n: f.counts for n, f in factors.layers.items() if f.counts is not None}
    return Bases(tuple(blocks), counts)


def _whole_matrices(observed: Observed, fixed: set[str]) -> dict[str, OuterMoments]:
    """Empty sums for the small weights of layers that act at several positions."""
    found = {}
    for site in observed.trace.sites:
        rule, name = site.rule.as_matrix, site.roles.get("weight", "")
        if rule is None or name in fixed or not name or rule.is_rank_one(site.call):
            continue
        shape = site.call.shapes["weight"]
        if shape.numel() <= LARGEST_MATRIX:
            found[name] = OuterMoments(Layout((name,), (shape,)), observed.outputs.device)
    return found


def _whole_block(moments: OuterMoments, parameters: Mapping[str, Tensor]) -> MatrixBlock:
    """A weight as one row, in the eigenbasis of its matrix."""
    values, vectors = eigh(moments.matrix)
    dtype = parameters[moments.layout.names[0]].dtype
    precision = (values.clamp(min=0) + FIXED_PRIOR).to(dtype)
    return KroneckerBlock(moments.layout, precision[None, None], columns=vectors[None].to(dtype))


def _stage(session: Session, segment: Segment, bases: Bases, part: Tensor, seed: int) -> Stage:
    moments = SquareMoments(bases.blocks)
    names = set(bases.block_of)
    for observed, gradients in _observed(session, part, seed):
        for one in gradients:
            moments.update(observed.trace, one, names)
    number, dtype = session.batches.num_data, next(session.model.parameters()).dtype
    first_half: dict[tuple[str, ...], Drift] = {}
    whole: dict[tuple[str, ...], Drift] = {}
    for block in bases.blocks:
        rate, prior = _rates(segment, block)
        squares = wide(moments.of_block(block))
        if block.names[0] in bases.counts:
            squares = _by_tokens(squares, bases.counts[block.names[0]], len(part) / number)
        curvature = squares / len(part) + prior
        for drift, share in ((first_half, 0.5), (whole, 1.0)):
            drift[block.names] = Drift.over(share / rate, curvature, number).to(dtype)
    return Stage(session, segment, bases, first_half, whole)


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
