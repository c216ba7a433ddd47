"""Products with the Hessian of the whole objective at one point, for many vectors at once."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.func import vmap

from engram.core.memory import available_bytes
from engram.core.state.process import plain_attention
from engram.retraining.stack import MEMORY_SHARE, Stack

Graph = tuple[Tensor, Tensor]  # the gradient of one part of the data, and the point
PASSES = 3  # as much as a forward pass keeps, a gradient that is differentiated again keeps


class HessianAt:
    """H v over all examples and the regulariser.

    What the products share, the gradient and its graph, is made once where it fits in memory.

    Args:
        stack: model and data.
        at: the point, [P].
        width: vectors that come at a time, at most.
    """

    def __init__(self, stack: Stack, at: Tensor, width: int) -> None:
        self.stack, self.at = stack, at
        self.slices = stack.slices(width)
        size = PASSES * stack.bytes_per_example * stack.num_data
        fits = size <= MEMORY_SHARE * available_bytes(at.device)
        self.graphs = [self._graph(part) for part in self.slices] if fits else None

    def __call__(self, vectors: Tensor) -> Tensor:
        """Rows of H v, [A, P]."""
        product = self.stack.prior_precision * vectors
        for graph in self.graphs or map(self._graph, self.slices):
            if graph[0].requires_grad:  # otherwise the loss is linear
                product += pulled_back(graph, vectors)
        return product

    def _graph(self, part: slice | Tensor) -> Graph:
        stack, leaf = self.stack, self.at.detach().requires_grad_()
        with torch.enable_grad(), plain_attention():
            outputs = stack.single(stack.layout.unflatten(leaf), stack.batch.select(part).inputs)
            loss = stack.likelihood.loss(outputs, stack.targets[part]).sum()
            return torch.autograd.grad(loss, leaf, create_graph=True)[0], leaf


def pulled_back(graph: Graph, vectors: Tensor) -> Tensor:
    """Derivatives of <gradient, v> for each of the vectors [A, ...], in the shape of the point."""

    def row(vector: Tensor) -> Tensor:
        return torch.autograd.grad(*graph, vector, retain_graph=True)[0]

    if len(vectors) > 1:  # for one, vmap is only slower
        with suppress(RuntimeError):  # an operation whose second derivative cannot be batched
            return vmap(row)(vectors)
    return torch.stack([row(vector) for vector in vectors])
