r"""Many copies of one model at once: stacked parameters, one weight per copy and example.

The objective of copy c is :math:`\sum_i w_{ci} \ell_i(\theta_c) + \delta/2\, |\theta_c|^2`; a
weight of 0 leaves the example out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from engram.core.data.batches import Batch, as_outputs
from engram.core.data.inputs import handed, mapped
from engram.core.dtypes import wide, widest
from engram.core.memory import available_bytes
from engram.core.parameters import Layout, Named
from engram.core.state.process import plain_attention
from engram.likelihoods import Likelihood
from engram.retraining.folding import Folded

CACHE_BYTES = 64 * 2**20  # activations of one part of the data, over all copies
MEMORY_SHARE = 0.25
LARGEST_STACK = 128
VECTORS_PER_COPY = 128  # parameters, gradients, curvature pairs and temporaries of a recipe


@dataclass(frozen=True, eq=False)
class Stack:
    """A model and its training data, ready to be evaluated at many parameters at once.

    Args:
        model: in eval mode while this is used; only its structure and buffers matter.
        batch: all examples, on the model's device.
        targets: in the likelihood's own form, [N, ...].
        likelihood: of the targets.
        prior_precision: delta of every entry of the flat vector, [P].
        layout: of the trainable parameters in a flat vector.
        start: the trained parameters, [P].
        bytes_per_example: what one copy keeps for one example until the backward pass.
        vectorised: whether ``vmap`` can run the model; otherwise copies run one after the other.
    """

    model: nn.Module
    batch: Batch
    targets: Tensor
    likelihood: Likelihood
    prior_precision: Tensor
    layout: Layout
    start: Tensor
    bytes_per_example: int
    vectorised: bool

    @property
    def num_data(self) -> int:
        """N."""
        return len(self.batch)

    @property
    def mean_prior(self) -> float:
        """Of delta, over the entries."""
        return float(wide(self.prior_precision).mean())

    def copies_at_once(self) -> int:
        """How many copies fit in the memory that is free now."""
        size = self.start.element_size()
        per_copy = VECTORS_PER_COPY * self.start.numel() * size + 2 * self.num_data * size
        budget = MEMORY_SHARE * available_bytes(self.start.device)
        return int(min(LARGEST_STACK, max(1, budget // per_copy)))

    def outputs(self, flat: Tensor, batch: Batch) -> Tensor:
        """Outputs of every copy on the same examples, [C, n, K], for parameters [C, P]."""
        return self._run(self.layout.unflatten(flat), batch.inputs, None)

    def value_and_gradient(self, flat: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The copies' objectives [C] and their gradients [C, P]; weights are [C, N]."""
        value, gradient = self.loss_and_gradient(flat, weights, self.slices(len(flat)))
        gradient += self.prior_precision * flat
        value += 0.5 * (wide(self.prior_precision) * wide(flat) ** 2).sum(1)
        return value, gradient

    def loss_and_gradient(
        self, flat: Tensor, weights: Tensor, slices: Sequence[slice | Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Weighted sums of the losses of some examples [C], and their gradients [C, P]."""
        value = torch.zeros(len(flat), dtype=widest(flat.device), device=flat.device)
        gradient = torch.zeros_like(flat)
        for part in slices:
            leaf = flat.detach().requires_grad_()
            with torch.enable_grad():
                losses = self._losses(self.outputs(leaf, self.batch.select(part)), part)
                total = (losses * weights[:, part]).sum(1)
            gradient += torch.autograd.grad(total.sum(), leaf)[0]
            value += wide(total.detach())
        return value, gradient

    def left_out(self, flat: Tensor, members: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Sums of the losses of each copy's own left-out examples [C], and gradients [C, P]."""
        longest = max(len(chosen) for chosen in members)
        value = torch.zeros(len(flat), dtype=widest(flat.device), device=flat.device)
        gradient = torch.zeros_like(flat)
        if longest == 0:
            return value, gradient
        table = torch.zeros(len(members), longest, dtype=torch.long)
        share = torch.zeros(len(members), longest, dtype=flat.dtype)
        for row, chosen in enumerate(members):
            table[row, : len(chosen)] = chosen
            share[row, : len(chosen)] = 1.0
        step = self.examples_at_once(len(members))
        for start in range(0, longest, step):
            rows = table[:, start : start + step]
            picked = self.batch.select(rows.flatten())
            leaf = flat.detach().requires_grad_()
            with torch.enable_grad():
                named = self.layout.unflatten(leaf)
                outputs = self._run(named, picked.inputs, rows.shape[1])
                targets = self.targets[rows.flatten().to(self.targets.device)]
                losses = self.likelihood.loss(outputs.flatten(0, 1), targets)
                weighted = losses * share[:, start : start + step].flatten().to(losses.device)
            gradient += torch.autograd.grad(weighted.sum(), leaf)[0]
            value += wide(weighted.detach()).unflatten(0, rows.shape).sum(1)
        return value, gradient

    def predict(self, flat: Tensor) -> Tensor:
        """Outputs of every copy on all examples, [C, N, K]."""
        parts = [self.outputs(flat, b) for b in self.parts(self.batch, len(flat))]
        return torch.cat(parts, dim=1)

    def parts(self, batch: Batch, copies: int) -> Iterator[Batch]:
        """A batch in parts that fit in the cache for this many copies."""
        step = self.examples_at_once(copies)
        for start in range(0, len(batch), step):
            yield batch.select(slice(start, start + step))

    def _losses(self, outputs: Tensor, part: slice | Tensor) -> Tensor:
        copies, count = outputs.shape[:2]
        targets = self.targets[part]
        repeated = targets.expand(copies, *targets.shape).flatten(0, 1)
        return self.likelihood.loss(outputs.flatten(0, 1), repeated).unflatten(0, (copies, count))

    def slices(self, copies: int) -> list[slice | Tensor]:
        """Parts of all the data whose activations, over this many copies, stay in the cache."""
        step = self.examples_at_once(copies)
        return [slice(start, start + step) for start in range(0, self.num_data, step)]

    def examples_at_once(self, copies: int) -> int:
        """Examples whose activations, over this many copies, stay in the cache."""
        return max(16, CACHE_BYTES // max(1, copies * self.bytes_per_example))

    def _run(self, named: Named, inputs: Any, own: int | None) -> Tensor:
        """Every copy on the same inputs, or on its own ``own`` consecutive rows of them."""
        copies = len(next(iter(named.values())))
        if own is not None:
            inputs = _own_rows(inputs, copies, own)
        with plain_attention():
            if self.vectorised and copies > 1:  # for one, vmap is only slower
                dims = (0, None if own is None else 0)
                stacked: Tensor = vmap(self.single, in_dims=dims)(named, inputs)
                return stacked
            rows = [
                self.single(
                    {name: value[c] for name, value in named.items()},
                    inputs if own is None else _pick(inputs, c),
                )
                for c in range(copies)
            ]
        return torch.stack(rows)

    def single(self, named: Named, inputs: Any, mode: Folded | None = None) -> Tensor:
        """Outputs of the model with other parameters."""
        args, kwargs = handed(inputs)
        try:
            with mode or Folded():
                return as_outputs(functional_call(self.model, named, args, kwargs))
        finally:
            for module in self.model.modules():
                if isinstance(module, nn.RNNBase):  # they keep a list of weights they last saw
                    module._init_flat_weights()


def _own_rows(inputs: Any, copies: int, own: int) -> Any:
    """[C * own, ...] -> [C, own, ...] for every tensor of the inputs."""
    return mapped(inputs, lambda t: t.unflatten(0, (copies, own)))


def _pick(inputs: Any, copy: int) -> Any:
    return mapped(inputs, lambda t: t[copy])
