r"""A group that is perturbed: its weighted gradient, curvature and inputs.

.. math:: \sum_j \epsilon_j \nabla\ell_j, \qquad \sum_j \epsilon_j J_j' \Lambda_j J_j

over parts of the training data and of other data. A weight of 1 takes an example out, one of -1
puts it in: a changed example is one of each. With draws from the posterior both are expectations
over them, as the equation has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import Named, inner, trainable
from engram.core.selection import spread
from engram.core.state.model import device_of
from engram.curvature.operators import (
    CurvatureOperator,
    GaussNewton,
    Hessian,
    Operator,
    Summed,
    TangentGaussNewton,
    Weighted,
)
from engram.engine.session import Observed, Session
from engram.engine.sites import is_rank_one, matrix_blocks
from engram.linalg.cg import Limits
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.exact_steps import solve_without
from engram.sensitivity.sampling import Draws, Expected, weights

# Solves without a group's Gauss-Newton matrix, by conjugate gradients
LARGEST_ITERATION = 200  # products with the matrix, a pass over the group each
DOUBLE_TOLERANCE = 1e-14  # relative residual at which they end: who uses double wants equality
TOLERANCE = 10**-4.5  # the same in single precision, or where the precision is known in part
PRODUCT_SAMPLE = 2048  # remaining examples that such products are over: 750 of 3000 did as well
GOOD_ENOUGH = 1e-3  # relative residual up to which a step that has not ended is not flagged
# What must remain of a precision without a group for its step to be trusted
SHARE_OF_PRIOR = 0.01  # of the prior's precision, in every direction


@dataclass(frozen=True)
class Part:
    """Examples of one data set, with the share of each that is taken out.

    Args:
        opened: the model with that data set.
        chosen: positions in it, ascending, [M].
        weights: eps, [M].
    """

    opened: Session
    chosen: Tensor
    weights: Tensor

    @classmethod
    def of(cls, opened: Session, chosen: Tensor, weights: Tensor) -> Part:
        """In one order, so that the order they are named in does not matter."""
        chosen, order = chosen.sort()
        return cls(opened, chosen, weights[order])

    @cached_property
    def weight_of(self) -> dict[int, float]:
        """eps by position."""
        return dict(zip(self.chosen.tolist(), self.weights.tolist(), strict=True))

    @property
    def weighted(self) -> Weighted:
        """For an operator."""
        return Weighted(self.chosen, self.weights)

    def passes(self, description: str) -> Iterator[tuple[Observed, Tensor]]:
        """Batches of this process's share of the examples, with their weights [B, 1]."""
        for observed in self.opened.passes(description, self.opened.own_rows(self.chosen)):
            found = [self.weight_of[int(i)] for i in observed.batch.indices]
            yield observed, torch.tensor(found, dtype=torch.float64)[:, None]


class Group:
    """The examples that are left out, or put in.

    Args:
        opened: the model with its training data.
        posterior: of it.
        parts: the examples; of the training data, or of others.
        draws: weights from the posterior, for expectations; None for the mean.
    """

    def __init__(
        self,
        opened: Session,
        posterior: Posterior,
        parts: Sequence[Part],
        draws: Draws | None = None,
    ) -> None:
        self.opened, self.posterior, self.parts, self.draws = opened, posterior, parts, draws
        self.layout = posterior.layout
        parameters = trainable(opened.model)
        self.parameters = {name: parameters[name] for name in self.layout.names}

    @property
    def size(self) -> int:
        """Examples in it."""
        return sum(len(part.chosen) for part in self.parts)

    @property
    def is_one_example(self) -> bool:
        """Whether it is one whole example of the training data, at the mean."""
        first = self.parts[0]
        alone = self.size == 1 and first.opened is self.opened
        return alone and float(first.weights[0]) == 1 and self.draws is None

    @property
    def largest_share(self) -> float:
        """The largest weight eps of any example of the group."""
        return max(float(part.weights.max()) for part in self.parts)

    def outweighs(self, step: Named, gradient: Named) -> bool:
        """Whether weights beyond 1 have more curvature along the step S^-1 g than all data.

        Then a first-order step says nothing: the group's own curvature is what it leaves out. With
        overflow there is no telling, and that is a yes.
        """
        if max(float(part.weights.abs().max()) for part in self.parts) <= 1:
            return False
        along = self.layout.flatten({name: step[name] for name in self.layout.names})
        own = float((wide(along) * wide(self.gauss_newton @ along[None])).sum())
        whole = inner(step, gradient)
        return not abs(own) <= whole < math.inf

    def gradient(self) -> Named:
        """sum_j eps_j grad loss_j, or its expectation over the draws."""
        if self.draws is None:
            return self._gradient()
        total = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        for draw in self.draws:
            with weights(self.opened.model, draw):
                for name, value in self._gradient().items():
                    total[name] += value / self.draws.samples
        return total

    def _gradient(self) -> Named:
        total = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        for part in self.parts:
            for observed, share in part.passes("gradient of the group"):
                seed = share.to(observed.residual) * observed.residual
                found = part.opened.pull_back(observed.batch, seed, self.parameters)
                for name, value in found.items():
                    total[name] += value
        return self.opened.peers.summed("gradient of the group", total)

    @cached_property
    def gauss_newton(self) -> Operator:
        """sum_j eps_j J_j' Lambda_j J_j, or its expectation over the draws."""
        return self._operator(TangentGaussNewton)

    @cached_property
    def hessian(self) -> Operator:
        """sum_j eps_j H_j, or its expectation over the draws."""
        return self._operator(Hessian)

    def _operator(self, kind: Callable[..., CurvatureOperator]) -> Operator:
        of_parts = [
            kind(p.opened, self.layout, examples=p.weighted, peers=self.opened.peers)
            for p in self.parts
        ]
        return self.expected(Summed(of_parts) if len(of_parts) > 1 else of_parts[0])

    def expected(self, operator: Operator) -> Operator:
        """An operator as an expectation over the draws; itself at the mean."""
        if self.draws is None:
            return operator
        return Expected(operator, self.opened.model, self.draws)

    def rest(self, prior: Tensor, scale: float) -> tuple[Summed, int]:
        """The Gauss-Newton matrix of what remains, over some examples that stand for all.

        Of the group's own examples what is left in, and what is put in; beside it how many examples
        a product is over.
        """
        share = torch.ones(self.opened.batches.num_data, dtype=torch.float64)
        added = [part for part in self.parts if part.opened is not self.opened]
        for part in self.parts:
            if part.opened is self.opened:
                share[part.chosen] -= part.weights.double()
        rest = share.nonzero()[:, 0]
        places = spread(len(rest), PRODUCT_SAMPLE) if len(rest) else rest
        sample = rest[places]
        examples = Weighted(sample, len(rest) / max(1, len(places)) * share[sample])
        peers = self.opened.peers
        operators = [GaussNewton(self.opened, self.layout, prior, examples, scale, peers)]
        for part in added:
            put_in = Weighted(part.chosen, -part.weights)
            own = GaussNewton(part.opened, self.layout, 0.0, put_in, scale, peers)
            operators.append(own)
        return Summed(operators), len(sample) + sum(len(part.chosen) for part in added)

    def inputs(self) -> dict[tuple[str, ...], Tensor]:
        """sum_j eps_j c_j c_j' of every Kronecker block whose layer acts at one position, [I, I].

        Where a layer acts at many positions, factors are left as they are, as for single examples.
        """
        total: dict[tuple[str, ...], Tensor] = {}
        for part in self.parts:
            for observed, share in part.passes("inputs of the group"):
                for names, columns in self._columns(observed):
                    square = columns.mT @ (share.to(columns) * columns)
                    total[names] = total.get(names, 0) + square
        named = {json.dumps(names): value for names, value in total.items()}
        whole = self.opened.peers.summed("inputs of the group", named, device_of(self.opened.model))
        return {tuple(json.loads(names)): value for names, value in whole.items()}

    def _columns(self, observed: Observed) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """The inputs [B, I] of the layers whose factors know them, with their block's names."""
        for site in observed.trace.sites:
            block = self.posterior.block_of.get(site.names[0])
            if block is None or not block.knows_inputs:
                continue
            if not is_rank_one(site, matrix_blocks([block])):
                continue
            columns = wide(site.call.input.reshape(len(observed.outputs), -1))
            if len(block.names) == 2:
                columns = torch.cat([columns, torch.ones_like(columns[:, :1])], dim=1)
            yield block.names, columns

    def solve_remaining(self, gradient: Named, whole: Operator | None = None) -> tuple[Named, bool]:
        """(W - the group's Gauss-Newton matrix)^-1 g, and whether not to trust it.

        Where what remains has hardly any curvature in some direction, the solution so far is
        returned and flagged: never an exploding number.

        Args:
            gradient: g.
            whole: W; the precision itself if not given.
        """
        posterior, right = self.posterior, self.layout.flatten(gradient)[None]
        first = posterior.solve_rows(right, self.layout)
        if not math.isfinite(float((wide(first) * wide(right)).sum())):
            return self.named(first), True  # weights so large that their squares overflow
        double = right.dtype == torch.float64 and not posterior.is_partial
        # whatever data remains, the precision should not fall far below the prior's
        smallest = SHARE_OF_PRIOR * min(posterior.prior_of(name) for name in gradient)
        limits = Limits(DOUBLE_TOLERANCE if double else TOLERANCE, LARGEST_ITERATION, smallest)
        found = solve_without(posterior, lambda v, _: self.gauss_newton @ v, right, limits, whole)
        if not found.vectors.any() and bool(found.indefinite[0]):
            return self.named(first), True
        bad = bool(found.indefinite[0]) or not float(found.residual[0]) <= GOOD_ENOUGH
        return self.named(found.vectors), bad

    def named(self, rows: Tensor) -> Named:
        """The first of some flat rows [1, P], by name."""
        return {name: value[0] for name, value in self.layout.unflatten(rows).items()}
