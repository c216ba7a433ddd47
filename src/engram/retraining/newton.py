r"""Simplified Newton steps of many copies: one Hessian, where they all start, serves all of them.

.. math:: \theta_c \leftarrow \theta_c - H^{-1} g_c

Copies that leave out little stay near their common start, so that the Hessian H of the whole
objective there does for every copy and every step. Systems with it are solved by block generalised
conjugate residuals, preconditioned with a Laplace posterior: a direction whose product with H is
known serves all copies. Where H is wrong for a copy (its left-out examples, the change of the
Hessian along the way), Anderson mixing over the copy's own last steps corrects it. A step that
makes no progress is not taken, but enters the mixing; a copy with several of them goes on by
L-BFGS.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.func import vmap

from engram.core.arguments import AUTO
from engram.core.dtypes import wide
from engram.core.memory import available_bytes, backing_off
from engram.core.state.process import plain_attention
from engram.linalg.gcr import WIDTH, BlockGCR
from engram.linalg.lbfgs import Apply
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.laplace import fitted
from engram.problem import Opener
from engram.retraining.quasi_newton import VALUE_ROUNDINGS, Progress
from engram.retraining.stack import MEMORY_SHARE, Objective, Stack

Pairs = list[tuple[Tensor, Tensor]]  # moves [C, P] and the changes of the gradient along them
Graph = tuple[Tensor, Tensor]  # the gradient of one part of the data, and the point

# How long the shared steps go on: longer saves gradients where they converge, wastes them where not
MOST_STEPS = 12  # a gradient over the data each
LARGEST_SHARE = 0.98  # of the gradient norm that a step may leave and still be taken
SLOW_SHARE = 0.5  # of the gradient norm: a step that leaves more counts as a failure
FAILURES = 4  # slow or refused steps after which a copy goes on by L-BFGS
# How exactly each step is solved for: shares of the gradient norm that is wanted in the end
SOLVED_SHARE = 0.8  # of it that a step may leave, as far as H tells
ROUNDING_SHARE = 0.5  # of what a step may leave: own changes below this are taken for rounding
# Products with H, each of the time of a gradient: fewer steps against memory for their directions
PRODUCTS_PER_COPY = 10  # that may be taken
FEWEST_PRODUCTS = 120  # allowed however few the copies are
GRAPH_PASSES = 3  # memory of a gradient that is differentiated again, in forward passes
# P up to which the preconditioner is a full precision, beyond Kronecker factors: fewer products
# against the time of the fit
DENSE_PARAMETERS = 2500


@backing_off
def fitted_preconditioner(
    model: nn.Module,
    opener: Opener,
    prior: float,
    *,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Posterior:
    """A Laplace posterior of the model, whose precision stands in for the Hessian."""
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    structure = "full" if entries <= DENSE_PARAMETERS else "kronecker"
    with opener.session(model, batch_size, progress) as opened:
        return fitted(opened, structure, check_prior_precision(prior))


def preconditioner(posterior: Posterior, stack: Stack) -> Apply:
    """S^-1 v for rows [A, P]; the prior's where the posterior has no precision of a parameter."""
    block = posterior.blocks[0] if posterior.blocks else None
    if block is not None and block.names == stack.layout.names:
        # one product with the inverse takes a tenth of the time of two triangular solves
        inverse = block.dense_inverse()
        if inverse is not None:
            matrix = inverse.to(stack.start)
            return lambda rows: rows.to(matrix) @ matrix
    covered = posterior.block_of

    def solve(rows: Tensor) -> Tensor:
        vectors = stack.layout.unflatten(rows)
        solved = posterior.solve(vectors)
        for name in vectors:
            if name not in covered:
                solved[name] = vectors[name] / posterior.prior_precision
        return stack.layout.flatten(solved)

    return solve


class SharedHessian:
    """H v over all examples and the regulariser, for many vectors at once.

    The operators of ``curvature`` go through the batches of a session again for every product. A
    stack has all examples in memory, and takes hundreds of products at one point: here the
    gradient and its graph, which the products share, are made once where they fit in memory.

    Args:
        stack: model and data.
        at: the point, [P].
        width: vectors that come at a time, at most.
    """

    def __init__(self, stack: Stack, at: Tensor, width: int) -> None:
        self.stack, self.at = stack, at
        self.slices = stack.slices(width)
        size = GRAPH_PASSES * stack.bytes_per_example * stack.num_data
        fits = size <= MEMORY_SHARE * available_bytes(at.device)
        self.graphs = [self._graph(part) for part in self.slices] if fits else None

    def times(self, vectors: Tensor) -> Tensor:
        """Rows of H v, [A, P]."""
        product = self.stack.prior_precision * vectors
        for graph in self.graphs or map(self._graph, self.slices):
            if graph[0].requires_grad:  # otherwise the loss is linear
                product += _derivatives(graph, vectors)
        return product

    def _graph(self, part: slice | Tensor) -> Graph:
        stack, leaf = self.stack, self.at.detach().requires_grad_()
        with torch.enable_grad(), plain_attention():
            outputs = stack.single(stack.layout.unflatten(leaf), stack.batch.select(part).inputs)
            loss = stack.likelihood.loss(outputs, stack.targets[part]).sum()
            return torch.autograd.grad(loss, leaf, create_graph=True)[0], leaf


def _derivatives(graph: Graph, vectors: Tensor) -> Tensor:
    """Derivatives of <gradient, v> by the point, for each of the vectors [A, P]."""

    def row(vector: Tensor) -> Tensor:
        return torch.autograd.grad(*graph, vector, retain_graph=True)[0]

    if len(vectors) > 1:  # for one, vmap is only slower
        with suppress(RuntimeError):  # an operation whose second derivative cannot be batched
            return vmap(row)(vectors)
    return torch.stack([row(vector) for vector in vectors])


class _AndersonMixing:
    """Anderson mixing: steps of each copy, and how its gradient changed along them.

    Args:
        like: the copies' parameters, [C, P].
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.pairs: Pairs = []

    def add(self, rows: Tensor, moves: Tensor, changes: Tensor) -> None:
        """A pair of the copies ``rows``; zero for the others."""
        full = torch.zeros_like(self.like), torch.zeros_like(self.like)
        full[0][rows], full[1][rows] = moves, changes
        self.pairs.append(full)

    def explain(self, rows: Tensor, gradient: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """The combination of own moves whose changes make up most of the gradient, and the rest.

        The weights minimise |g - changes w|^2 + (rounding |w|)^2.
        """
        if not self.pairs:
            return torch.zeros_like(gradient), gradient
        moves = torch.stack([pair[0][rows] for pair in self.pairs], dim=1)
        changes = torch.stack([pair[1][rows] for pair in self.pairs], dim=1)
        gram = wide(changes @ changes.mT)
        gram.diagonal(dim1=1, dim2=2).add_((ROUNDING_SHARE * wide(goals)[:, None]).square())
        weights = torch.linalg.solve(gram, wide(changes @ gradient[:, :, None]))
        weights = weights.mT.to(gradient.dtype)
        return (weights @ moves)[:, 0], gradient - (weights @ changes)[:, 0]


def simplified_newton(
    objective: Objective,
    state: Progress,
    targets: Tensor,
    precondition: Apply,
    report: Callable[[int], None],
) -> Pairs:
    """Step until the copies' gradient norms are below their targets, or steps make no progress.

    Args:
        objective: of the copies.
        state: where they are, all at one point; it is changed. Copies still ``moving`` afterwards
            need other steps.
        targets: gradient norms to reach, [C].
        precondition: applies an approximate inverse of the Hessian to rows [A, P].
        report: called with the number of copies that have just finished.

    Returns:
        The copies' moves and the changes of their gradients; 0 for a copy at rest.
    """
    weights, start_value = objective.weights, state.value.clone()
    solver, own = _solver(objective.stack, state.flat, precondition), _AndersonMixing(state.flat)
    targets = targets.to(state.flat.device)
    rounding = VALUE_ROUNDINGS * torch.finfo(state.flat.dtype).eps * start_value.abs()
    report(state.settle(targets))
    failures = torch.zeros(len(state.flat), dtype=torch.long)
    for _ in range(MOST_STEPS):
        rows = (state.moving & (failures < FAILURES)).nonzero()[:, 0].to(state.flat.device)
        if len(rows) == 0:
            break
        goals = SOLVED_SHARE * targets[rows].to(state.flat.dtype)
        back, rest = own.explain(rows, state.gradient[rows], goals)
        step = -back - solver.solve(rest, goals)[0]
        trial = state.flat[rows] + step
        value, gradient = objective.stack.value_and_gradient(trial, weights[rows])
        state.evaluations[rows.cpu()] += 1
        norm, before = wide(gradient).norm(dim=1), state.norm[rows]
        good = (norm <= LARGEST_SHARE * before) & (value <= (start_value + rounding)[rows])
        own.add(rows, step, gradient - state.gradient[rows])
        kept = rows[good]
        state.flat[kept], state.value[kept] = trial[good], value[good]
        state.gradient[kept] = gradient[good]
        failures[rows[~good | (norm > SLOW_SHARE * before)].cpu()] += 1
        report(state.settle(targets))
    return own.pairs


def _solver(stack: Stack, start: Tensor, precondition: Apply) -> BlockGCR:
    """The solver of systems with the Hessian where all copies start."""
    hessian = SharedHessian(stack, start[0].clone(), min(WIDTH, len(start)))
    allowed = max(PRODUCTS_PER_COPY * len(start), FEWEST_PRODUCTS)
    return BlockGCR(precondition, hessian.times, start, min(allowed, start.shape[1]))
