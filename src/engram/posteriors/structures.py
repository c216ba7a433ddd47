"""The structures of a Laplace posterior by name: one function each, from a fit to its blocks.

A new structure is a function here and a line in ``STRUCTURES``; which of them ``"auto"`` stands for
is decided in :mod:`engram.posteriors.laplace`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.data.batches import Batches
from engram.core.dtypes import wide
from engram.core.memory import available_bytes
from engram.core.parameters import Layout, Named, trainable
from engram.core.progress import Pace
from engram.core.selection import spread
from engram.core.state.model import device_of
from engram.curvature.kfac import KroneckerFactors
from engram.curvature.kinds import ggn_roots
from engram.curvature.moments import OuterMoments, SquareMoments
from engram.curvature.operators import Hessian
from engram.curvature.reached import Reached
from engram.engine.dropout import dropping
from engram.engine.last_layer import last_layer
from engram.engine.session import Observed, Session, narrowed
from engram.errors import PosteriorError
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.linalg.kronecker_factors import Factors
from engram.posteriors.low_rank_fit import fit_low_rank
from engram.posteriors.tolerance import sampled_share

SPREAD = 256  # examples whose outputs decide how many classes are sampled: a better choice or time
COPIES = 3  # of a dense matrix [P, P] that are held during a fit
Gradients = Sequence[Tensor | None]
FitBlocks = Callable[["Fit"], tuple[Block, ...]]
QUICKER = 'curvature="fisher" takes one for a batch, with one sampled label per example'


class Fit:
    """The session and the settings of one fit, which its structure's function is given.

    Args:
        session: model, data and likelihood.
        delta: the prior precision.
        curvature: that is summed.
        seed: of what is sampled.
        tolerance: how far the sum may be off.
        fixed: parameters that training could not move, where its record is known; the curvature is
            then that which training saw, with dropout.
    """

    def __init__(
        self,
        session: Session,
        delta: float,
        curvature: str,
        seed: int,
        tolerance: float = 0.0,
        fixed: Collection[str] | None = None,
    ) -> None:
        self.session, self.delta, self.curvature, self.seed = session, delta, curvature, seed
        self.sampled_share = sampled_share(tolerance)
        self.fixed, self.stopped = set(fixed or ()), fixed is not None
        parameters = trainable(session.model)
        self.parameters = {n: p for n, p in parameters.items() if n not in self.fixed}
        self.dtype = next(iter(self.parameters.values())).dtype
        self.structure: str | None = None  # what was taken in place of the one asked for
        self.record: dict[str, Any] = {}

    def within(self, session: Session) -> Fit:
        """The same fit in a session of fewer parameters."""
        fixed = self.fixed if self.stopped else None
        return Fit(session, self.delta, self.curvature, self.seed, fixed=fixed)

    def passes(self, description: str, each: Callable[[Observed, Gradients, range], None]) -> None:
        """Call ``each`` with the gradients of every output vector of every batch.

        Beside them it gets the numbers of the vectors that are still to come in the batch.
        """
        likelihood, count = self.session.likelihood, self.num_leading
        pace: Pace | None = None
        for observed in self.observed(description):
            vectors = ggn_roots(observed, likelihood, self.curvature, self.seed, count)
            number = vectors.shape[2]
            if pace is None:
                examples = len(self.session.peers.rows(self.session.batches.num_data))
                batches = -(-examples // len(observed.batch))
                pace = Pace(number * batches, "backward passes over batches", QUICKER)
            with torch.no_grad():
                for r in range(number):
                    own = observed.trace.arranged(vectors[:, :, r].contiguous())
                    each(observed, own, range(r + 1, number))
                    pace.step()

    def observed(self, description: str) -> Iterator[Observed]:
        """Every batch of this process, with dropout where the curvature of training is wanted."""
        seed = self.seed + self.session.peers.rank  # masks of its own, as each batch has
        with dropping(self.session.model, seed) if self.stopped else nullcontext():
            yield from self.session.passes(description, self.session.own_rows())

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return device_of(self.session.model)

    @cached_property
    def num_leading(self) -> int | None:
        """Outputs of every example that are taken exactly; None where all are.

        From examples spread over the data, so that no batch decides about its own.
        """
        if self.curvature != "ggn" or self.sampled_share == 0:
            return None
        num_data = self.session.batches.num_data
        outputs = [o.outputs for o in self.session.passes("outputs", spread(num_data, SPREAD))]
        found = self.session.likelihood.num_leading(torch.cat(outputs), self.sampled_share)
        number: int | None = self.session.peers.agreed("leading outputs", found)
        return number

    def square_moments(
        self, names: set[str], blocks: Sequence[KroneckerBlock] = ()
    ) -> SquareMoments:
        """Squared gradients of these parameters over the data."""
        moments = SquareMoments(blocks)
        self.passes("curvature", lambda o, g, r: moments.update(o.trace, g, names))
        moments.take_sums(self.session.peers, self.device)
        return moments

    def diagonal(self, moments: SquareMoments, names: Sequence[str]) -> tuple[DiagonalBlock, ...]:
        """Diagonal blocks; a parameter that no output depends on keeps the prior's precision."""
        blocks = []
        for name in names:
            zeros = wide(torch.zeros_like(self.parameters[name]))
            precision = moments.by_name.get(name, zeros) + self.delta
            blocks.append(DiagonalBlock.of(name, precision.to(self.dtype)))
        return tuple(blocks)


def dense_bytes(num_params: int) -> int:
    """Memory that the fit of a full matrix takes."""
    return COPIES * torch.float64.itemsize * num_params**2


def fit_diagonal(fit: Fit) -> tuple[Block, ...]:
    names = list(fit.parameters)
    return fit.diagonal(fit.square_moments(set(names)), names)


def fit_isotropic(fit: Fit) -> tuple[Block, ...]:
    moments = fit.square_moments(set(fit.parameters))
    trace = sum(float(m.sum()) for m in moments.by_name.values())
    value = trace / sum(p.numel() for p in fit.parameters.values()) + fit.delta
    return tuple(
        DiagonalBlock.of(name, torch.full_like(p.detach(), value))
        for name, p in fit.parameters.items()
    )


def kronecker_sums(fit: Fit) -> tuple[KroneckerFactors, SquareMoments]:
    """Kronecker factors, and squares for what has no factors, in one pass."""
    factors, moments = KroneckerFactors(fit.fixed), SquareMoments()
    present: list[Reached] = []

    def each(observed: Observed, gradients: Gradients, left: range) -> None:
        if not present:
            factors.of(observed.trace)
            present.append(Reached(observed.trace))
        factors.update_rows(observed.trace, gradients)
        present[0].add(gradients)
        if not left:
            factors.update_reached(present.pop())
        rest = set(fit.parameters) - factors.covered()
        if rest:
            moments.update(observed.trace, gradients, rest)

    fit.passes("curvature", each)
    factors.take_sums(fit.session.peers, fit.device)
    moments.take_sums(fit.session.peers, fit.device)
    factors.drop_unused()
    return factors, moments


def kronecker_blocks(
    fit: Fit, factors: KroneckerFactors, moments: SquareMoments
) -> tuple[tuple[KroneckerBlock, ...], tuple[DiagonalBlock, ...]]:
    """K-FAC blocks, and diagonal blocks for the rest."""
    blocks = _divided_blocks(fit, list(factors.layers.values()))
    rest = [name for name in fit.parameters if name not in factors.covered()]
    return blocks, fit.diagonal(moments, rest)


def _divided_blocks(fit: Fit, layers: Sequence[Factors]) -> tuple[KroneckerBlock, ...]:
    """The blocks of all layers, each one's eigenvectors found by one of the processes."""
    peers = fit.session.peers
    owners = peers.shares([factors.cost for factors in layers])
    own = {
        number: factors.block(fit.delta, fit.dtype)
        for number, factors in enumerate(layers)
        if owners[number] == peers.rank
    }
    if peers.alone:
        return tuple(own.values())
    named = {
        f"{number} {name}": tensor
        for number, block in own.items()
        for name, tensor in block.tensors.items()
    }
    found = peers.spread("eigenvectors", named, fit.device)
    return tuple(
        KroneckerBlock(
            factors.layout,
            found[f"{number} precision"],
            rows=found.get(f"{number} rows"),
            columns=found.get(f"{number} columns"),
            row_share=found.get(f"{number} row_share"),
        )
        for number, factors in enumerate(layers)
    )


def fit_kronecker(fit: Fit) -> tuple[Block, ...]:
    blocks, rest = kronecker_blocks(fit, *kronecker_sums(fit))
    return blocks + rest


def fit_ekfac(fit: Fit) -> tuple[Block, ...]:
    blocks, rest = kronecker_blocks(fit, *kronecker_sums(fit))
    moments = fit.square_moments({n for b in blocks for n in b.names}, blocks)
    corrected = tuple(
        KroneckerBlock(
            block.layout,
            (moments.by_block[block.names] + fit.delta).to(fit.dtype),
            block.rows,
            block.columns,
        )
        for block in blocks
    )
    return corrected + rest


def _dense(fit: Fit, names: Sequence[str]) -> tuple[Block, ...]:
    parameters: Named = {name: fit.parameters[name].detach() for name in names}
    layout = Layout.of(parameters)
    device = device_of(fit.session.model)
    _check_size(layout, device)
    if fit.curvature == "hessian":
        matrix = Hessian(fit.session, layout, peers=fit.session.peers).matrix()
    else:
        moments = OuterMoments(layout, device)
        for observed in fit.observed("curvature"):
            vectors = ggn_roots(observed, fit.session.likelihood, fit.curvature, fit.seed)
            with torch.no_grad():
                per_seed = [
                    observed.trace.arranged(vectors[:, :, r].contiguous())
                    for r in range(vectors.shape[2])
                ]
                moments.update(observed.trace, per_seed)
        moments.take_sums(fit.session.peers)
        matrix = moments.matrix
    matrix.diagonal().add_(fit.delta)
    return (DenseBlock.factorise(layout, matrix),)


def _check_size(layout: Layout, device: torch.device) -> None:
    needed, free = dense_bytes(layout.num_params), available_bytes(device)
    if needed > free:
        raise PosteriorError(
            f"a full precision that fits in the free {free / 2**30:.1f} GiB",
            f"{layout.num_params:,} parameters, which need {needed / 2**30:.1f} GiB",
            'use structure="kronecker" or "last_layer"',
        )


def fit_full(fit: Fit) -> tuple[Block, ...]:
    return _dense(fit, list(fit.parameters))


def fit_low_rank_block(fit: Fit) -> tuple[Block, ...]:
    block, record = fit_low_rank(
        fit.session, fit.delta, fit.curvature, fit.seed, names=tuple(fit.parameters)
    )
    fit.record = {"low_rank": record}
    return (block,)


def fit_last_layer(fit: Fit) -> tuple[Block, ...]:
    """The layer whose result is the model's output, or comes last before it; the others are fixed.

    What comes before it is run without gradients.
    """
    if fit.session.held:  # opened for that layer alone
        return _dense(fit, list(fit.parameters))
    names = last_layer(fit.session.model, fit.session.batches)
    with narrowed(fit.session, names) as head:
        return _dense(fit.within(head), [name for name in names if name in fit.parameters])


STRUCTURES: dict[str, FitBlocks] = {
    "isotropic": fit_isotropic,
    "diagonal": fit_diagonal,
    "kronecker": fit_kronecker,
    "ekfac": fit_ekfac,
    "low_rank": fit_low_rank_block,
    "full": fit_full,
    "last_layer": fit_last_layer,
}
# which parameters a structure is over, where it is not over all of them
OVER: dict[str, Callable[[nn.Module, Batches], tuple[str, ...]]] = {"last_layer": last_layer}
