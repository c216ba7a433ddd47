r"""Leverages: how much of the data's information each example holds about its own outputs.

.. math:: \mathrm{tr}(V \Lambda) = \sum_r u_r' V u_r, \qquad \sum_r u_r u_r' = \Lambda

One product takes a forward and a backward pass and what the posterior makes of the gradients at
every layer: a vector costs about what an example of the pass does. All leverages with all their
vectors would cost many passes, so that some examples are taken, and of many outputs some vectors.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from engram.core.data.batches import Batch, call
from engram.core.state.model import device_of
from engram.curvature.kinds import drawn_roots
from engram.engine.session import LARGEST_BATCH, Session
from engram.likelihoods import Likelihood
from engram.likelihoods.draws import Draws
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators.base import eigen

# What leverages may cost, in examples of the pass: a vector of a leverage takes a forward and a
# backward pass and the layers' perturbations, and was measured at 0.7 to 1.3 examples, which have a
# tangent as well (docs/results/diagnostics.md).
PER_VECTOR = 8  # examples for which there may be a vector: with the gradient, below a quarter
OPENING = 12  # that opening, planning and checking a large model takes as long as, at the least
OPENING_SMALL = 40  # and one more for so many that would fit a batch: small nets are quicker
LARGEST_OPENING = 256  # at most: of the smallest nets it is the operations that count, not examples

# Examples with a leverage where the estimator does not give all: the error of the effective
# parameters falls with their root (it is printed), the cost grows with them.
LEVERAGE_SAMPLE = 256  # at most
FAIR_SAMPLE = 128  # before a leverage that is drawn gets more vectors than the fewest
EXACT_SAMPLE = 32  # for which there must be room if leverages are to be exact

# Vectors of a leverage: more make it more exact, and leave room for fewer examples.
EXACT_RANK = 16  # of an output Hessian whose whole root is taken, a vector for each of its columns
FEWEST_VECTORS, MOST_VECTORS = 3, 16  # for a part of the root, and random signs on what is left


@dataclass(frozen=True)
class Leverages:
    """tr(V Lambda) and the largest eigenvalue of V Lambda, [N], NaN where not computed."""

    trace: Tensor
    largest: Tensor
    lost: int = 0  # computed, and no finite number
    exact: bool = True  # or estimated from some of the outputs

    @classmethod
    def of_all(cls, eigenvalues: Tensor) -> Leverages:
        """From the eigenvalues of every example, [N, R]."""
        trace = eigenvalues.sum(1)
        return cls(trace, eigenvalues.amax(1), int((~torch.isfinite(trace)).sum()))


@dataclass(frozen=True)
class Budget:
    """How many examples' leverages are computed, from how many vectors each.

    Counted beforehand: whatever the number of examples and outputs, leverages take at most a
    quarter of what the sensitivities take.

    Args:
        examples: at most.
        vectors: of each.
        exact: whether they are the whole root of the output Hessian.

    Example:
        >>> Budget.of(60_000, rank=9)
        Budget(examples=256, vectors=9, exact=True)
        >>> Budget.of(1000, rank=9)
        Budget(examples=41, vectors=3, exact=False)
        >>> Budget.of(5000, rank=999)
        Budget(examples=156, vectors=4, exact=False)
    """

    examples: int
    vectors: int
    exact: bool

    @classmethod
    def of(cls, passed: float, rank: int, num_data: int = LEVERAGE_SAMPLE) -> Budget:
        """What there is room for.

        Args:
            passed: what the call takes without leverages, in examples of the pass.
            rank: of the output Hessian.
            num_data: examples in all.
        """
        room, vectors = int(passed / PER_VECTOR), rank
        enough = min(num_data, EXACT_SAMPLE)
        if rank > EXACT_RANK or room < enough * rank:
            vectors = min(max(room // FAIR_SAMPLE, FEWEST_VECTORS), MOST_VECTORS, rank)
        return cls(min(max(1, room // vectors), LEVERAGE_SAMPLE), vectors, vectors == rank)


def sampled_leverages(
    session: Session, posterior: Posterior, outputs: Tensor | None, seed: int
) -> Leverages:
    """Leverages of a random subset of the examples, as many as the budget has room for.

    Args:
        outputs: of all examples, [N, K]; None where they were not kept, and are made again.
    """
    count, precisions = session.batches.num_data, _precisions(posterior)
    first = session.placed(session.batches.take(torch.zeros(1, dtype=torch.long)))
    rank = session.likelihood.hessian_rank(_outputs(session, first, outputs).shape[1])
    opening = OPENING + min(session.fitting // OPENING_SMALL, LARGEST_OPENING)
    passed = 3 * (count + opening) / (2 + len(precisions))  # forward, backward, perturbations
    found = Budget.of(passed, rank, count)
    budget = Budget(**session.peers.agreed("room for leverages", asdict(found)))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(count, generator=generator)[: budget.examples].sort().values
    own_chosen = chosen[session.peers.rows(len(chosen))]
    size = max(1, min(LARGEST_BATCH, session.largest_part) // budget.vectors)
    traces, largest = [], []
    batches = session.batches.subset(own_chosen, size)
    for part in session.parts(batches, "leverages", -(-len(own_chosen) // size)):
        batch = session.placed(part)
        there = _outputs(session, batch, outputs)
        targets = session.likelihood.prepare(there, batch.targets)
        root = _root(session.likelihood, there, targets, Draws(seed, batch.indices), budget)
        products = _consistent(*_products(session, batch, root.vectors, precisions))
        traces.append(products.diagonal(dim1=1, dim2=2).sum(1).cpu())
        largest.append(_largest(products, root.columns).cpu())
    own = {"trace": torch.cat(traces), "largest": torch.cat(largest)} if traces else {}
    whole = session.peers.joined("leverages", own)
    lost = int((~torch.isfinite(whole["trace"])).sum())
    trace, top = (_spread(whole[name], chosen, count) for name in ("trace", "largest"))
    return Leverages(trace, top, lost, budget.exact)


def _outputs(session: Session, batch: Batch, outputs: Tensor | None) -> Tensor:
    """Of the examples of a batch, [B, K]."""
    if outputs is not None:
        return outputs[batch.indices].to(device_of(session.model))
    with torch.no_grad():
        return call(session.model, batch.inputs)


def _spread(values: Tensor, chosen: Tensor, count: int) -> Tensor:
    result = torch.full((count,), math.nan, dtype=values.dtype)
    result[chosen] = values
    return result


@dataclass(frozen=True)
class Root:
    """Vectors F [B, K, R] with F F' = Lambda, if only in expectation.

    The first ``columns`` of them are no draws: their F F' alone is at most Lambda.
    """

    vectors: Tensor
    columns: int


def _root(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, draws: Draws, budget: Budget
) -> Root:
    count = budget.vectors
    if budget.exact:
        factor = likelihood.hessian_factor(outputs, targets)
        return Root(factor, factor.shape[2])
    return Root(*drawn_roots(likelihood, outputs, targets, draws, count))


def _precisions(posterior: Posterior) -> list[Posterior]:
    """The posterior, and of one that is exact in some directions only what is in these."""
    if not posterior.is_partial:
        return [posterior]
    within = replace(posterior, blocks=tuple(block.only_kept() for block in posterior.blocks))
    return [posterior, within]


def _products(
    session: Session, batch: Batch, vectors: Tensor, precisions: list[Posterior]
) -> list[Tensor]:
    """F' V F for each of the precisions, [B, R, R].

    Every vector has a copy of its example in the batch, so that all take one pass, and cost no more
    than as many examples do. Where a batch has no room for the vectors of one example, they are
    taken after each other.
    """
    examples, _, count = vectors.shape
    at_once = max(1, session.largest_part // examples)
    found: list[list[tuple[Tensor, ...]]] = []  # for some vectors, for every site
    for some in torch.arange(count).split(at_once):
        rows = torch.arange(examples).repeat_interleave(len(some))
        trace = session.traced(batch.select(rows))
        seed = vectors[:, :, some].transpose(1, 2).flatten(0, 1)
        sites = trace.perturbations(seed, precisions)
        shape = (examples, len(some), -1)
        found.append([tuple(t.reshape(shape) for t in site) for site in sites])
        trace.release()
    totals = [vectors.new_zeros(examples, count, count) for _ in precisions]
    for parts in zip(*found, strict=True):
        gradient, *moved = (torch.cat(whole, dim=1) for whole in zip(*parts, strict=True))
        for total, perturbation in zip(totals, moved, strict=True):
            total += gradient @ perturbation.mT
    return [0.5 * (total + total.mT) for total in totals]


def _consistent(products: Tensor, kept: Tensor | None = None) -> Tensor:
    r"""F' V F, [B, R, R], with the example's own curvature in the precision.

    A low-rank precision does not hold it outside the kept directions: there :math:`L` becomes
    :math:`L (I + L)^{-1}`, as if it did.
    """
    if kept is None:
        return products
    values, turn = eigen(products - kept)
    values = values.clamp(min=0)
    return kept + (turn * (values / (1 + values))[:, None]) @ turn.mT


def _largest(products: Tensor, columns: int) -> Tensor:
    """The largest eigenvalue for some columns of F, [B]; of all outputs it is no smaller."""
    if columns == 0:
        return torch.full_like(products[:, 0, 0], math.nan)
    return eigen(products[:, :columns, :columns])[0].amax(1)
