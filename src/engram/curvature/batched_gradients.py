"""Gradients for many seeds in one backward pass, where that gives what single passes give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Machine epsilons, of the gradients by all inputs together, that two ways of summing may be apart;
# what a derivative gets wrong is far above
ROUNDINGS_OF_ALL = 100


def many_gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor], count: int
) -> list[Tensor]:
    """Gradients of sum_o <seed_om, output_o> for every m, [count, *shape] per input.

    All at once where the operations can be vectorised, else one by one. Some have a derivative that
    takes the dimension of the seeds for one of its own: that of a group norm raises for most
    shapes, and for one example in one group it is wrong. So a random sum of the answers is
    compared with the answer to that sum, which takes one backward pass more.
    """
    if not outputs:
        return [x.new_zeros(count, *x.shape) for x in inputs]

    def once(grads: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
        return list(
            torch.autograd.grad(
                outputs,
                inputs,
                grads,
                retain_graph=True,
                is_grads_batched=batched,
                allow_unused=True,
                materialize_grads=True,
            )
        )

    try:
        # what no output depends on comes back without the leading dimension
        found = [
            g if g.dim() == x.dim() + 1 else g.expand(count, *x.shape)
            for g, x in zip(once(seeds, batched=True), inputs, strict=True)
        ]
    except RuntimeError:  # an operation without a batching rule
        found = []
    if found:
        weights = _weights(count)
        if _agree(found, weights, once([_summed(seed, weights) for seed in seeds])):
            return found
    rows = [once([seed[m] for seed in seeds]) for m in range(count)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _weights(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 0.5


def _summed(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.tensordot(weights.to(rows), rows, dims=1)


def _agree(found: Sequence[Tensor], weights: Tensor, expected: Sequence[Tensor]) -> bool:
    """Whether the weighted sums are as expected, up to rounding: of their own and of all inputs.

    Infinities and NaN are no reason to doubt: single passes have them too, and who uses the
    gradients refuses them.
    """
    lengths = [g.detach().reshape(len(weights), -1).norm(dim=1) for g in found]
    sizes = [float(_summed(length, weights)) for length in lengths]
    total = sum(sizes)
    for gradient, size, wanted in zip(found, sizes, expected, strict=True):
        rounding = torch.finfo(gradient.dtype).eps
        difference = float((_summed(gradient.detach(), weights) - wanted.detach()).norm())
        if difference > rounding**0.5 * size + ROUNDINGS_OF_ALL * rounding * total:
            return False
    return True
