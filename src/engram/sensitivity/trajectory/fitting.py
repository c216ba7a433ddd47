r"""What is measured at the checkpoints: eigenbases for all of them, curvature and scale of each.

The bases come from the Kronecker factors of all checkpoints together. The eigenvalues are each
checkpoint's own: the mean squared gradients there, in that basis (as in EK-FAC), times the factor
that gives them the leverage of all layers together (:mod:`.held_out`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import Named
from engram.curvature.kfac import KroneckerFactors
from engram.curvature.moments import SquareMoments
from engram.engine.drift import Drift, Drifts
from engram.engine.session import Session
from engram.linalg.block import MatrixBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.precision import Precision
from engram.sensitivity.trajectory.gradient_products import Gradients, Products, gradient_products
from engram.sensitivity.trajectory.gradient_sketch import entries_kept
from engram.sensitivity.trajectory.held_out import (
    FEWEST_HELD,
    HELD_OUT,
    curvature_scale,
    held_out_leverage,
    rows_added,
    rows_held,
)
from engram.sensitivity.trajectory.samples import HELD, KEPT_BYTES, REST, ROOTS, SEEN, Sample, parts
from engram.training.segments import Segment

BlockNames = tuple[str, ...]

FIXED_PRIOR = 1.0  # of factors that only give a basis: any positive number
SHORTEST = 1e-12  # training time of an entry: one that never had a step moves nowhere


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
class Clock:
    """Training time and decay of a segment, read once, in the widest precision.

    Args:
        times: k by name, of the parameter's shape or one number.
        decays: W likewise.
    """

    times: Named
    decays: Named

    @classmethod
    def of(cls, segment: Segment) -> Clock:
        """Of a segment."""
        times = {name: wide(t).clamp(min=SHORTEST) for name, t in segment.time_of_middle.items()}
        return cls(times, {name: wide(d) for name, d in segment.decay.items()})

    def rates(self, block: MatrixBlock) -> tuple[Tensor, Tensor]:
        """1 / k and the weight decay W / C in the eigenbasis of a block."""
        shapes = dict(zip(block.layout.names, block.layout.shapes, strict=True))
        rates = {n: self.times[n].reciprocal().expand(s) for n, s in shapes.items()}
        found = block.projected(rates)
        if not any(self.decays[n].any() for n in shapes):
            return found, torch.zeros_like(found)
        decays = {n: (self.decays[n] / self.times[n]).expand(s) for n, s in shapes.items()}
        return found, block.projected(decays)


@dataclass(frozen=True)
class Fitted:
    """What a segment does to displacements.

    Args:
        first_half: the drift from the segment's start to its checkpoint.
        whole: over the whole segment.
        scale: that the factors' curvature was multiplied by.
    """

    first_half: Drifts = field(repr=False)
    whole: Drifts = field(repr=False)
    scale: float = 1.0


def samples(sessions: Sequence[Session], fixed: set[str], seed: int) -> list[Sample]:
    """Examples for each checkpoint, some of them held out."""
    first = sessions[0]
    number, parameters = first.batches.num_data, first.engine.parameters
    shapes = [p.shape for name, p in parameters.items() if name not in fixed]
    seen = first.observe(first.batches.take(torch.zeros(1, dtype=torch.long)))
    outputs = seen.outputs.shape[1]
    seen.trace.release()
    size, roots = rows_added(shapes), min(ROOTS, outputs)
    rows = rows_held(entries_kept(shapes, size))
    roots = roots if rows >= FEWEST_HELD * roots else 1
    found = []
    for session, part in zip(sessions, parts(number, len(sessions), seed), strict=True):
        groups = _groups(part, rows // roots, seed)
        found.append(Sample(session, groups, outputs, seed, roots, KEPT_BYTES // len(sessions)))
    return found


def bases(samples: Sequence[Sample], fixed: set[str]) -> Bases:
    """Eigenbases of Kronecker factors from all checkpoints together; other weights have none."""
    parameters = samples[-1].session.engine.parameters
    factors = KroneckerFactors(fixed)
    for sample in samples:
        for trace, gradients in sample.batches():
            factors.update_columns(trace)
            for one in gradients:
                factors.update_rows(trace, one)
    factors.drop_unused()
    dtype = next(iter(parameters.values())).dtype
    blocks: list[MatrixBlock] = [f.block(FIXED_PRIOR, dtype) for f in factors.layers.values()]
    covered = {name for block in blocks for name in block.names} | fixed
    rest = {n: p.detach() for n, p in parameters.items() if n not in covered}
    blocks += [DiagonalBlock.of(name, torch.ones_like(p)) for name, p in rest.items()]
    counts = {n: f.counts for n, f in factors.layers.items() if f.counts is not None}
    return Bases(tuple(blocks), counts)


def fit(sample: Sample, segment: Segment, bases: Bases) -> Fitted:
    """The drifts of a segment, with the curvature of its sample."""
    session, clock = sample.session, Clock.of(segment)
    number, dtype = session.batches.num_data, next(session.model.parameters()).dtype
    measured = _measured(sample, bases, clock)
    curvatures, rates, priors = {}, {}, {}
    for block in bases.blocks:
        own = measured.squares(block) / sample.num_examples
        if block.names[0] in bases.counts:
            share = sample.num_examples / number
            own = _by_tokens(own, bases.counts[block.names[0]], share)
        curvatures[block.names] = own
        rates[block.names], priors[block.names] = clock.rates(block)
    scale = measured.scale(curvatures, rates, sample) if measured.products else 1.0

    def over(share: float) -> Drifts:
        return {
            names: Drift.over(share / rates[names], scale * curvature + priors[names], number).to(
                dtype
            )
            for names, curvature in curvatures.items()
        }

    return Fitted(over(0.5), over(1.0), scale)


def _groups(part: Tensor, most: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some examples to hold out, some whose products with them are made, and the rest.

    All of them are rest where the gradients of too few examples fit into memory.

    Args:
        part: the examples of a checkpoint.
        most: whose products are made.
        seed: of the choice.
    """
    count = min(most, len(part))
    count = count if count >= FEWEST_HELD else 0
    order = part[torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))]
    out = count // HELD_OUT
    found = (order[:out], order[out:count], order[count:])
    held, seen, rest = (group.sort().values for group in found)
    return held, seen, rest


@dataclass(frozen=True)
class Measured:
    """Sums over a sample, from one pass.

    Args:
        held: squared gradients of the held-out examples in the eigenbases.
        others: those of all others.
        products: of the gradients of some examples; None where there is no room for them.
    """

    held: SquareMoments
    others: SquareMoments
    products: Products | None

    def squares(self, block: MatrixBlock) -> Tensor:
        """Of all examples, in the shape of a block's eigenvalues."""
        others = wide(self.others.of_block(block))
        if self.products is None:  # all are others
            return others
        return wide(self.held.of_block(block)) + others

    def scale(
        self,
        curvatures: Mapping[BlockNames, Tensor],
        rates: Mapping[BlockNames, Tensor],
        sample: Sample,
    ) -> float:
        """The factor of the curvature with which the mean leverage is that of all layers together.

        Args:
            curvatures: eigenvalues.
            rates: 1 / k of every direction.
            sample: that this is of.
        """
        assert self.products is not None
        number = sample.session.batches.num_data
        wanted = held_out_leverage(self.products, number, sample.seed)
        blocks = [self.held.block_of[names[0]] for names in curvatures]
        energies = [wide(self.held.of_block(block)) / len(self.products.cross) for block in blocks]
        slow = list(rates.values())
        return curvature_scale(
            _over(list(curvatures.values()), slow), _over(energies, slow), wanted
        )


def _measured(sample: Sample, bases: Bases, clock: Clock) -> Measured:
    """One pass over a sample."""
    held, others = SquareMoments(bases.blocks), SquareMoments(bases.blocks)
    rest = _added(others, sample.batches(REST))
    out, seen = len(sample.groups[HELD]), len(sample.groups[SEEN])
    if not out:
        _exhaust(rest)
        return Measured(held, others, None)
    times = {name: clock.times[name] for name in bases.block_of}
    some = chain(_added(held, sample.batches(HELD)), _added(others, sample.batches(SEEN)))
    parameters = sample.session.engine.parameters
    size = rows_added([parameters[name].shape for name in times])
    products = gradient_products(some, out, out + seen, times, size)
    _exhaust(rest)
    return Measured(held, others, products)


def _added(moments: SquareMoments, batches: Iterable[Gradients]) -> Iterator[Gradients]:
    """The same batches, their squared gradients added up on the way."""
    names = set(moments.block_of)
    for trace, gradients in batches:
        for one in gradients:
            moments.update(trace, one, names)
        yield trace, gradients


def _exhaust(batches: Iterable[Gradients]) -> None:
    for _ in batches:
        pass


def _over(values: Sequence[Tensor], rates: Sequence[Tensor]) -> Tensor:
    """Values times k, of all directions."""
    return torch.cat([(v / r).flatten() for v, r in zip(values, rates, strict=True)])


def _by_tokens(squares: Tensor, counts: Tensor, share: float) -> Tensor:
    """Squares of an embedding by how often its tokens come, none less often than once.

    The examples that curvature is measured on have few of the rare tokens: measured row by row,
    these would have no curvature at all, and an example that has one would move it without end.
    """
    shares = wide(counts) / counts.sum().clamp(min=1)
    once = shares[shares > 0].min() * share if bool((shares > 0).any()) else 1.0
    return shares.clamp(min=once)[None, :, None] * squares.sum(1, keepdim=True)
