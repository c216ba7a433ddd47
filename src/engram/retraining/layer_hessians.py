r"""The Hessian of each linear layer by itself, in the directions that its inputs mostly lie in.

.. math:: H_l = \sum_n \frac{\partial^2 \ell_n}{\partial a_n \partial a_n'} \otimes h_n h_n'
    + \delta I

The weights act on inputs :math:`h_n` through :math:`a_n = W h_n` alone, so this is exact, and one
matrix product sums it over all examples. A Kronecker-factored posterior takes the mean of the two
factors apart and leaves out the curvature of the net itself; with these blocks in its place, a
system with the whole Hessian takes fewer products. Making them is worth it for many systems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.core.state.process import plain_attention
from engram.linalg.kronecker import KroneckerBlock
from engram.linalg.lbfgs import Apply
from engram.posteriors.gaussian import Posterior
from engram.retraining.folding import Folded
from engram.retraining.hessian_at import pulled_back
from engram.retraining.stack import CACHE_BYTES, Stack

LARGEST = 2048  # entries of a layer, in the kept directions of its inputs
MOST_DIRECTIONS = 48  # of its inputs that are kept
MOST_OUTPUTS = 64  # of a layer: each takes a product with the Hessian of what follows it


@dataclass(frozen=True)
class _Layer:
    """One weight (with its bias): its block of the posterior, and the kept input directions."""

    block: KroneckerBlock
    columns: Tensor  # [I, r]
    covariance: Tensor  # of the posterior in these directions, [O, r]

    @classmethod
    def of(cls, block: KroneckerBlock) -> _Layer | None:
        """None where the block has no basis of inputs, or the layer is too wide."""
        groups, outputs, inputs = block.precision.shape
        if block.rows is None or block.columns is None or groups > 1 or outputs > MOST_OUTPUTS:
            return None
        order = block.precision[0].sum(0).argsort(descending=True)
        kept = order[: min(inputs, LARGEST // outputs, MOST_DIRECTIONS)]
        return cls(block, block.columns[0][:, kept], block.covariance[0][:, kept])

    def correction(self, rows: Mapping[str, Tensor], inverse: Tensor) -> Mapping[str, Tensor]:
        """What the inverse of the layer's Hessian gives, less what the posterior gives."""
        assert self.block.rows is not None
        turn = self.block.rows[0]
        kept = self.block.matrix(rows)[:, 0] @ self.columns
        new = (kept.flatten(1) @ inverse).view_as(kept)
        old = turn @ ((turn.mT @ kept) * self.covariance)
        return self.block.named(((new - old) @ self.columns.mT)[:, None])


class _Perturbed(Folded):
    """While this is entered, outputs of linear layers are leaves of the graph, and inputs kept."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = weights
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in weights}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is not functional.linear:
            return result
        for name, weight in self.weights.items():
            if any(value is weight for value in args):
                change = torch.zeros_like(result).requires_grad_()
                self.seen[name].append((args[0].detach(), change))
                return result + change
        return result


def sharpened(stack: Stack, at: Tensor, posterior: Posterior, solve: Apply) -> Apply:
    """``solve`` with the Hessians of the linear layers in place of the posterior's blocks.

    Args:
        stack: model and data.
        at: where the Hessians are taken, [P].
        posterior: whose blocks give the input directions.
        solve: applies its covariance to rows [A, P].

    Returns:
        ``solve`` itself where no layer has a Hessian of its own that is positive.
    """
    blocks = [block for block in posterior.blocks if isinstance(block, KroneckerBlock)]
    found = {block.names[0]: _Layer.of(block) for block in blocks}
    layers = {name: layer for name, layer in found.items() if layer is not None}
    columns = {name: layer.columns for name, layer in layers.items()}
    inverses: dict[str, Tensor] = {}
    for name, hessian in layer_hessians(stack, at, columns).items():
        factor, failed = torch.linalg.cholesky_ex(hessian)
        if not bool(failed):
            inverses[name] = torch.cholesky_inverse(factor)
    if not inverses:
        return solve

    def apply(rows: Tensor) -> Tensor:
        solved, named = stack.layout.unflatten(solve(rows)), stack.layout.unflatten(rows)
        for name, inverse in inverses.items():
            for part, change in layers[name].correction(named, inverse).items():
                solved[part] = solved[part] + change
        return stack.layout.flatten(solved)

    return apply


def layer_hessians(stack: Stack, at: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hessians [O r, O r] of weights in given directions of their inputs, [I, r] for each name.

    A basis with one more row than the weight has inputs takes the bias in. Layers that do not
    read one row an example, once, have none.
    """
    totals: dict[str, Tensor] = {}
    for part in _slices(stack, columns):
        named = {n: v.detach().requires_grad_() for n, v in stack.layout.unflatten(at).items()}
        mode = _Perturbed({name: named[name] for name in columns})
        batch = stack.batch.select(part)
        with torch.enable_grad(), plain_attention():
            outputs = stack.single(named, batch.inputs, mode)
            loss = stack.likelihood.loss(outputs, stack.targets[part]).sum()
            for name, seen in mode.seen.items():
                if len(seen) == 1 and seen[0][0].dim() == 2 and len(seen[0][0]) == len(batch):
                    term = _summed(loss, *seen[0], columns[name])
                    totals[name] = totals[name] + term if name in totals else term
    prior = stack.layout.unflatten(stack.prior_precision)
    for name, total in totals.items():  # a bias has the weight's: they precondition, no more
        total.diagonal().add_(float(prior[name].flatten()[0]))
    return totals


def _slices(stack: Stack, columns: Mapping[str, Tensor]) -> list[slice]:
    """Parts of the data for which the products of pairs of directions stay in the cache."""
    widest = max(
        (stack.layout.unflatten(stack.start)[name].shape[0] for name in columns), default=1
    )
    size = stack.start.element_size() * MOST_DIRECTIONS**2
    step = min(stack.examples_at_once(2 * widest), max(1, CACHE_BYTES // size))
    return [slice(start, start + step) for start in range(0, stack.num_data, step)]


def _summed(loss: Tensor, inputs: Tensor, change: Tensor, columns: Tensor) -> Tensor:
    r"""Sum over examples of the outputs' Hessian (x) inputs inputs', [O r, O r].

    Both factors are symmetric, so each pair is summed once.
    """
    (gradient,) = torch.autograd.grad(loss, change, create_graph=True, materialize_grads=True)
    outputs, kept = change.shape[1], columns.shape[1]
    if gradient.requires_grad:
        units = torch.eye(outputs, dtype=change.dtype, device=change.device)
        units = units[:, None].expand(outputs, *change.shape)
        curvature = pulled_back((gradient, change), units).detach().movedim(0, 1)  # [n, O, O]
    else:  # the loss is linear
        curvature = change.new_zeros(len(change), outputs, outputs)
    turned = inputs @ columns[: inputs.shape[1]]
    if len(columns) > inputs.shape[1]:
        turned = turned + columns[-1]
    (up, down), (left, right) = (
        torch.triu_indices(size, size, device=change.device) for size in (outputs, kept)
    )
    pairs = curvature[:, up, down].mT @ (turned[:, left] * turned[:, right])
    whole = pairs[_places(outputs, up, down)][:, _places(kept, left, right)]
    whole = whole.unflatten(1, (kept, kept)).unflatten(0, (outputs, outputs))
    return whole.movedim(2, 1).reshape(outputs * kept, outputs * kept)


def _places(size: int, first: Tensor, second: Tensor) -> Tensor:
    """Where each entry of a symmetric matrix stands among the pairs, [size * size]."""
    table = torch.empty(size, size, dtype=torch.long, device=first.device)
    table[first, second] = torch.arange(len(first), device=first.device)
    table[second, first] = table[first, second]
    return table.flatten()
