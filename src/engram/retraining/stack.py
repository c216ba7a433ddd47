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
from torch.nn.attention import SDPBackend, sdpa_kernel

from engram.batches import Batch, Batches, Data, as_outputs
from engram.engine.prepare import device_of
from engram.engine.session import available_bytes
from engram.errors import DataError, EngineError, NonFiniteError
from engram.likelihoods import Likelihood
from engram.parameters import Layout, Named, check_finite_weights, trainable

CACHE_BYTES = 24 * 2**20  # activations of one part of the data, over all copies
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
        prior_precision: delta.
        layout: of the trainable parameters in a flat vector.
        start: the trained parameters, [P].
        bytes_per_example: what one copy keeps for one example until the backward pass.
        vectorised: whether ``vmap`` can run the model; otherwise copies run one after the other.
    """

    model: nn.Module
    batch: Batch
    targets: Tensor
    likelihood: Likelihood
    prior_precision: float
    layout: Layout
    start: Tensor
    bytes_per_example: int
    vectorised: bool

    @property
    def num_data(self) -> int:
        """N."""
        return len(self.batch)

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
        value, gradient = self.loss_and_gradient(flat, weights, self._slices(len(flat)))
        gradient += self.prior_precision * flat
        value += 0.5 * self.prior_precision * (flat.double() ** 2).sum(1)
        return value, gradient

    def loss_and_gradient(
        self, flat: Tensor, weights: Tensor, slices: Sequence[slice | Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Weighted sums of the losses of some examples [C], and their gradients [C, P]."""
        value = torch.zeros(len(flat), dtype=torch.float64, device=flat.device)
        gradient = torch.zeros_like(flat)
        for part in slices:
            leaf = flat.detach().requires_grad_()
            with torch.enable_grad():
                losses = self._losses(self.outputs(leaf, self.batch.select(part)), part)
                total = (losses * weights[:, part]).sum(1)
            gradient += torch.autograd.grad(total.sum(), leaf)[0]
            value += total.detach().double()
        return value, gradient

    def hessian_times(self, at: Tensor, vectors: Tensor) -> Tensor:
        """Rows of H v at one point [P], over all examples and the regulariser, [C, P]."""
        product = self.prior_precision * vectors
        for part in self._slices(len(vectors)):
            leaf = at.detach().requires_grad_()
            batch, targets = self.batch.select(part), self.targets[part]
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                outputs = self._single(self.layout.unflatten(leaf), batch.inputs)
                loss = self.likelihood.loss(outputs, targets).sum()
                gradient = torch.autograd.grad(loss, leaf, create_graph=True)[0]
            product += torch.autograd.grad(gradient, leaf, vectors, is_grads_batched=True)[0]
        return product

    def left_out_gradient(self, flat: Tensor, members: Sequence[Tensor]) -> Tensor:
        """Sum of the gradients of each copy's own left-out examples, [C, P]."""
        longest = max(len(chosen) for chosen in members)
        gradient = torch.zeros_like(flat)
        if longest == 0:
            return gradient
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
        return gradient

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

    def _slices(self, copies: int) -> list[slice | Tensor]:
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
        with sdpa_kernel(SDPBackend.MATH):
            if self.vectorised:
                dims = (0, None if own is None else 0)
                stacked: Tensor = vmap(self._single, in_dims=dims)(named, inputs)
                return stacked
            rows = [
                self._single(
                    {name: value[c] for name, value in named.items()},
                    inputs if own is None else _pick(inputs, c),
                )
                for c in range(copies)
            ]
        return torch.stack(rows)

    def _single(self, named: Named, inputs: Any) -> Tensor:
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        try:
            return as_outputs(functional_call(self.model, named, args, kwargs))
        finally:
            for module in self.model.modules():
                if isinstance(module, nn.RNNBase):  # they keep a list of weights they last saw
                    module._init_flat_weights()


def _own_rows(inputs: Any, copies: int, own: int) -> Any:
    """[C * own, ...] -> [C, own, ...] for every tensor of the inputs."""
    if isinstance(inputs, dict):
        return {k: v.unflatten(0, (copies, own)) for k, v in inputs.items()}
    return tuple(v.unflatten(0, (copies, own)) for v in inputs)


def _pick(inputs: Any, copy: int) -> Any:
    if isinstance(inputs, dict):
        return {k: v[copy] for k, v in inputs.items()}
    return tuple(v[copy] for v in inputs)


def open_stack(
    model: nn.Module, data: Data, likelihood: Likelihood, prior_precision: float
) -> Stack:
    """Read the data, check it, and find out how the model can be stacked.

    Call inside :func:`engram.engine.prepare.undisturbed`.
    """
    check_finite_weights(model)
    parameters: Named = {name: p.detach() for name, p in trainable(model).items()}
    if not parameters:
        raise EngineError(
            "a model with trainable parameters", "none that requires gradients", "unfreeze some"
        )
    if len({p.dtype for p in parameters.values()}) > 1:
        raise EngineError(
            "trainable parameters of one type",
            ", ".join(sorted({str(p.dtype) for p in parameters.values()})),
            "convert the model with .float() or .double()",
        )
    layout = Layout.of(parameters)
    batches = Batches(data, 1)
    batch = batches.take(torch.arange(batches.num_data)).to(device_of(model))
    start = layout.flatten(parameters).clone()
    plain = Stack(model, batch, batch.targets, likelihood, prior_precision, layout, start, 1, False)
    size = _bytes_per_example(plain)
    sized = Stack(
        model, batch, batch.targets, likelihood, prior_precision, layout, start, size, False
    )
    targets = _prepared_targets(sized)
    vectorised = _can_vectorise(sized)
    return Stack(
        model, batch, targets, likelihood, prior_precision, layout, start, size, vectorised
    )


def _bytes_per_example(stack: Stack) -> int:
    """Bytes that autograd keeps for one more example, its inputs aside: copies share those."""
    few = min(2, stack.num_data)
    positions = torch.arange(2 * few) % stack.num_data
    inputs = stack.batch.select(slice(0, 1)).inputs
    values = inputs.values() if isinstance(inputs, dict) else inputs
    own = sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))
    more = _bytes_kept(stack, positions) - _bytes_kept(stack, positions[:few])
    return max(64, more // few - own)


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
        if outputs.shape[0] != len(part):
            raise DataError(
                "one row of outputs per example",
                f"{outputs.shape[0]} rows for {len(part)} examples",
                "return outputs [N, K] from the model",
            )
        if not torch.isfinite(outputs).all():
            raise NonFiniteError(
                "finite outputs", "NaN or infinity on the training data", "clean the data"
            )
        prepared.append(stack.likelihood.prepare(outputs, part.targets))
    return torch.cat(prepared)


def _can_vectorise(stack: Stack) -> bool:
    """Whether vmap gives what running the copies one by one gives, on a few examples."""
    few = stack.batch.select(slice(0, 3))
    noise = torch.linspace(0.9, 1.1, stack.start.numel(), dtype=stack.start.dtype)
    pair = torch.stack([stack.start, stack.start * noise.to(stack.start.device)])
    with torch.no_grad():
        expected, again = stack.outputs(pair, few), stack.outputs(pair, few)
    if not torch.equal(expected, again):
        raise EngineError(
            "a model that gives the same outputs twice in eval mode",
            f"outputs that differ by {float((expected - again).abs().max()):.2g}",
            "switch random layers off in eval mode, or pass a training function of your own",
        )
    stacked = Stack(**{**vars(stack), "vectorised": True})
    leaf = pair.clone().requires_grad_()
    try:
        with torch.enable_grad():
            found = stacked.outputs(leaf, few)
            torch.autograd.grad(found.sum(), leaf)
    except Exception:  # whatever vmap cannot do, the loop over copies can
        return False
    tolerance = 1e-9 if found.dtype == torch.float64 else 1e-4
    scale = 1 + float(expected.abs().max())
    return bool((found.detach() - expected).abs().max() <= tolerance * scale)
