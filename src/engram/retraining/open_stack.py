"""A trained model made ready for stacking: its data read and checked, what can be batched found."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram.core.data.batches import Batches, Data, check_output_rows
from engram.core.data.inputs import tensors_of
from engram.core.errors import EngineError, NonFiniteError
from engram.core.parameters import Layout, Named, check_finite_weights, check_one_type, trainable
from engram.core.state.model import device_of
from engram.engine.refusals import named_failures
from engram.likelihoods import Likelihood
from engram.retraining.prior import Prior, prior_entries
from engram.retraining.stack import Stack


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
    sized = Stack(model, batch, batch.targets, likelihood, prior, layout, start, size, False)
    targets = _prepared_targets(sized)
    vectorised = _can_vectorise(sized)
    return Stack(model, batch, targets, likelihood, prior, layout, start, size, vectorised)


def _bytes_per_example(stack: Stack) -> int:
    """Bytes that autograd keeps for one more example, its inputs aside: copies share those."""
    few = min(2, stack.num_data)
    positions = torch.arange(2 * few) % stack.num_data
    inputs = stack.batch.select(slice(0, 1)).inputs
    own = sum(t.numel() * t.element_size() for t in tensors_of(inputs))
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
        check_output_rows(outputs, len(part))
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
