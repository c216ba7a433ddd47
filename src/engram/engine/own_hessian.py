"""Second derivatives through autograd functions that may lack a part, against differences.

A backward that takes what it needs from a detached tensor has right gradients, and a derivative by
the gradient alone. The Hessian then lacks a part, and no symmetry or other identity shows it. Such
are functions of the user's own, and PyTorch's weight norm, which takes the norms for constants.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engram.core.data.batches import Batch, as_outputs
from engram.core.data.inputs import handed, mapped
from engram.core.parameters import Named, trainable
from engram.core.state.process import plain_attention
from engram.engine.refusals import pass_on
from engram.engine.self_check import Expected

STEP = 1e-5  # of the differences, in double precision
TOLERANCE = 1e-3


def has_true_hessian(model: nn.Module, probe: Batch, expected: Expected) -> bool:
    """Whether the derivative of the gradient along one direction is its difference there."""
    if not expected.functions:
        return True
    values: Named = {name: _wide(p.detach()) for name, p in trainable(model).items()}
    generator = torch.Generator().manual_seed(0)
    direction = [
        torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v)
        for v in values.values()
    ]

    def at(step: float) -> list[Tensor]:
        pairs = zip(values.values(), direction, strict=True)
        return [(value + step * along).requires_grad_() for value, along in pairs]

    def gradient(leaves: list[Tensor]) -> list[Tensor]:
        named = dict(zip(values, leaves, strict=True))
        return _derivative([_loss(model, probe, _wide(expected.seed), named)], leaves, None)

    try:
        with torch.enable_grad(), plain_attention():
            upper, lower, here = gradient(at(STEP)), gradient(at(-STEP)), at(0.0)
            curved = [
                (g, d) for g, d in zip(gradient(here), direction, strict=True) if g.requires_grad
            ]
            found = _derivative([g for g, _ in curved], here, [d for _, d in curved])
    except RuntimeError as error:  # nothing to compare with
        pass_on(error)
        return False
    triples = zip(found, upper, lower, strict=True)
    difference = torch.cat([(f - (u - w) / (2 * STEP)).flatten() for f, u, w in triples])
    size = torch.cat([f.flatten() for f in found]).norm() + 1e-6
    return bool(difference.norm() <= TOLERANCE * size)


def _loss(model: nn.Module, probe: Batch, seed: Tensor, values: Named) -> Tensor:
    """A curved function of the outputs, in double precision."""
    buffers: Named = {name: _wide(buffer) for name, buffer in model.named_buffers()}
    args, kwargs = handed(mapped(probe.inputs, _wide))
    outputs = as_outputs(functional_call(model, values | buffers, args, kwargs))
    return (seed * outputs.square()).sum()


def _derivative(of: list[Tensor], by: list[Tensor], weights: list[Tensor] | None) -> list[Tensor]:
    found = torch.autograd.grad(
        of, by, weights, create_graph=weights is None, allow_unused=True, materialize_grads=True
    )
    return list(found)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
