r"""Many copies of one model at once: stacked parameters, one weight per copy and example.

The objective of copy c is :math:`\sum_i w_{ci} \ell_i(\theta_c) + \delta/2\, |\theta_c|^2`; a
weight of 0 leaves the example out. Copies run together under ``vmap`` where the model allows it,
which is found out when the stack is opened, and else one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from engram.core.data.batches import Batch, Batches, Data, check_output_rows, flat_outputs
from engram.core.data.inputs import handed, mapped, tensors_of
from engram.core.dtypes import wide, widest
from engram.core.memory import available_bytes
from engram.core.parameters import Layout, Named, check_finite_weights, check_one_type, trainable
from engram.core.state.model import device_of
from engram.core.state.process import plain_attention
from engram.engine.refusals import named_failures
from engram.errors import EngineError, NonFiniteError
from engram.likelihoods import Likelihood
from engram.retraining.prior import Prior, prior_entries

# Parts of the data that all copies go through together: large enough to keep the processor busy,
# small enough for its cache
CACHE_BYTES = 64 * 2**20  # activations of one part, over all copies
FEWEST_EXAMPLES = 16  # of one part, however large they are
FEWEST_BYTES = 64  # counted for an example, however little autograd keeps of it
# Copies that are trained together: they share work, and memory
MEMORY_SHARE = 0.25  # of the free memory that a stack may take
LARGEST_STACK = 128  # copies: more share little more, and are lost together when a run is killed
VECTORS_PER_COPY = 128  # [P] each: parameters, gradients, L-BFGS pairs and temporaries
LARGEST_SHARED_GROUP = 0.05  # of the data left out; beyond, copies' Hessians differ too much
# Whether vmap runs the model as a loop does
SAME_DOUBLE, SAME_SINGLE = 1e-9, 1e-4  # share of an output that it may change by rounding
PERTURBED = 0.1  # share by which weights are moved for a second copy to compare


def _untold() -> None:
    """Nobody asks how many gradients there were."""


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
        on_gradient: called before every gradient over the data.
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
    on_gradient: Callable[[], None] = _untold

    @property
    def num_data(self) -> int:
        """N."""
        return len(self.batch)

    @property
    def mean_prior(self) -> float:
        """Mean of delta over the entries."""
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
        self.on_gradient()
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
        return max(FEWEST_EXAMPLES, CACHE_BYTES // max(1, copies * self.bytes_per_example))

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

    def single(self, named: Named, inputs: Any) -> Tensor:
        """Outputs of the model with other parameters."""
        args, kwargs = handed(inputs)
        try:
            return flat_outputs(functional_call(self.model, named, args, kwargs))
        finally:
            for module in self.model.modules():
                if isinstance(module, nn.RNNBase):  # they keep a list of weights they last saw
                    module._init_flat_weights()


@dataclass(frozen=True)
class Objective:
    """The copies' objectives: which examples each leaves out.

    Args:
        stack: model and data.
        members: the left-out examples of each copy; none for a refit with everything.
    """

    stack: Stack
    members: tuple[Tensor, ...]

    @property
    def weights(self) -> Tensor:
        """0 where a copy leaves the example out, else 1, [C, N]."""
        start = self.stack.start
        weights = start.new_ones(len(self.members), self.stack.num_data)
        for row, chosen in enumerate(self.members):
            weights[row, chosen.to(start.device)] = 0.0
        return weights

    def only(self, rows: Tensor) -> Objective:
        """The objectives of some of the copies."""
        return Objective(self.stack, tuple(self.members[row] for row in rows.tolist()))

    @property
    def shareable(self) -> bool:
        """Whether something is left out, and little enough for the copies to share one Hessian."""
        longest = max(len(chosen) for chosen in self.members)
        return 0 < longest <= max(1.0, LARGEST_SHARED_GROUP * self.stack.num_data)


def _own_rows(inputs: Any, copies: int, own: int) -> Any:
    """[C * own, ...] -> [C, own, ...] for every tensor of the inputs."""
    return mapped(inputs, lambda t: t.unflatten(0, (copies, own)))


def _pick(inputs: Any, copy: int) -> Any:
    return mapped(inputs, lambda t: t[copy])


def open_stack(
    model: nn.Module, data: Data, likelihood: Likelihood, prior_precision: Prior
) -> Stack:
    """Read the data, check it, and find out how the model can be stacked.

    Call inside :func:`engram.core.state.model.state_preserved`.
    """
    check_finite_weights(model)
    parameters: Named = {name: p.detach() for name, p in trainable(model).items()}
    if not parameters:
        raise EngineError(
            "a model with trainable parameters", "none that requires gradients", "unfreeze some"
        )
    check_one_type(model)
    layout = Layout.of(parameters)
    batches = Batches(data, 1)
    batch = batches.take(torch.arange(batches.num_data)).to(device_of(model))
    start = layout.flatten(parameters).clone()
    prior = prior_entries(prior_precision, layout, start)
    plain = Stack(model, batch, batch.targets, likelihood, prior, layout, start, 1, False)
    with named_failures("on the data"):
        size = _bytes_per_example(plain)
    sized = replace(plain, bytes_per_example=size)
    return replace(sized, targets=_prepared_targets(sized), vectorised=_can_vectorise(sized))


def _bytes_per_example(stack: Stack) -> int:
    """Bytes that autograd keeps for one more example, its inputs aside: copies share those."""
    few = min(2, stack.num_data)
    positions = torch.arange(2 * few) % stack.num_data
    inputs = stack.batch.select(slice(0, 1)).inputs
    own = sum(t.numel() * t.element_size() for t in tensors_of(inputs))
    more = _bytes_kept(stack, positions) - _bytes_kept(stack, positions[:few])
    return max(FEWEST_BYTES, more // few - own)


def _bytes_kept(stack: Stack, positions: Tensor) -> int:
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    leaf = stack.start[None].clone().requires_grad_()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        outputs = stack.outputs(leaf, stack.batch.select(positions))
    return sum(kept.values()) + 4 * outputs.numel() * outputs.element_size()


def _prepared_targets(stack: Stack) -> Tensor:
    """Checked targets of all examples; one forward pass, also checked."""
    prepared = []
    for part in stack.parts(stack.batch, 1):
        with torch.no_grad():
            outputs = stack.outputs(stack.start[None], part)[0]
        check_output_rows(outputs, len(part))
        if not torch.isfinite(outputs).all():
            raise NonFiniteError(
                "finite outputs",
                "NaN or infinity on the training data",
                "look for NaN or infinity in its inputs, and remove those examples",
            )
        prepared.append(stack.likelihood.prepare(outputs, part.targets))
    return torch.cat(prepared)


def _can_vectorise(stack: Stack) -> bool:
    """Whether vmap gives what running the copies one by one gives, on a few examples."""
    few = stack.batch.select(slice(0, 3))
    noise = torch.linspace(
        1 - PERTURBED, 1 + PERTURBED, stack.start.numel(), dtype=stack.start.dtype
    )
    pair = torch.stack([stack.start, stack.start * noise.to(stack.start.device)])
    with torch.no_grad():
        expected, again = stack.outputs(pair, few), stack.outputs(pair, few)
    if not torch.equal(expected, again):
        raise EngineError(
            "a model that gives the same outputs twice in eval mode",
            f"outputs that differ by {float((expected - again).abs().max()):.2g}",
            "switch random layers off in eval mode, or pass a training function of your own",
        )
    stacked = replace(stack, vectorised=True)
    leaf = pair.clone().requires_grad_()
    try:
        with torch.enable_grad():
            found = stacked.outputs(leaf, few)
            torch.autograd.grad(found.sum(), leaf)
    except Exception:  # whatever vmap cannot do, the loop over copies can
        return False
    tolerance = SAME_DOUBLE if found.dtype == torch.float64 else SAME_SINGLE
    scale = 1 + float(expected.abs().max())
    return bool((found.detach() - expected).abs().max() <= tolerance * scale)
