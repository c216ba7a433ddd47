"""A plan's passes against plain autograd, and second derivatives against differences.

On a few examples, before anything is computed: per-example gradients must be autograd's, and the
pass through the backward pass must fit them. A backward of the user's own that takes what it needs
from a detached tensor has right gradients, and a derivative by the gradient alone: the Hessian then
lacks a part, and no symmetry or other identity shows it. PyTorch's weight norm, which takes the
norms for constants, is such a one. So these are held against differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call

from engram.core.data.batches import Batch, call, flat_outputs
from engram.core.data.inputs import handed, mapped
from engram.core.parameters import Named, trainable
from engram.core.state.process import plain_attention
from engram.engine.passes import Trace, trace
from engram.engine.plan import Plan
from engram.engine.refusals import coarsest, pass_on
from engram.errors import EngineError

# How far apart rounding can bring two ways of computing one gradient, relative to its length and,
# where that vanishes, to a share of the longest of all parameters' gradients.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
COARSE_ROUNDING = 5e-2  # half precision
SHARE_OF_LONGEST = 1e-3  # of that length, in place of one that vanishes
TWICE = 10  # such roundings that a pass through the backward pass, with more sums, may be off by

# Differences of gradients in double precision: a smaller step shows rounding, a larger one
# curvature; what a Hessian lacks is far above what either leaves.
DIFFERENCE_STEP = 1e-5  # of the parameters, along a random direction
DIFFERENCE_TOLERANCE = 1e-3  # of the length of the derivative
SHORTEST_DERIVATIVE = 1e-6  # added to that length: a derivative of zero has rounding all the same

LARGEST_WALK = 100_000  # nodes of a graph that are looked at for a name
# PyTorch's own whose derivative takes the norms of the weights for constants
LACKING = {"WeightNormInterfaceBackward0": "weight_norm of torch"}


@dataclass(frozen=True)
class Expected:
    """What autograd says of a few examples: outputs, and each one's gradient of <seed, f>.

    The gradients come from the same batch as ours, since rounding may differ between batch sizes
    by more than any tolerance in nets that amplify it (normalisation of almost constant features).
    """

    outputs: Tensor
    seed: Tensor
    gradients: list[Named]
    functions: list[str]  # of the graph, whose second derivative may lack a part
    precision: torch.dtype  # the coarsest that the pass goes through

    @classmethod
    def of(cls, model: nn.Module, probe: Batch) -> Expected:
        """By one backward pass for each example: the other rows of the seed are zero."""
        parameters = trainable(model)
        with torch.enable_grad(), plain_attention():
            outputs = call(model, probe.inputs)
            if not outputs.requires_grad:
                raise EngineError(
                    "real outputs that depend on the trainable parameters",
                    f"outputs of {outputs.dtype} without a derivative",
                    "return the outputs themselves: no detach(), no argmax(), no torch.no_grad()",
                )
            seed, row = _random(outputs), torch.zeros_like(outputs)
            found = []
            for i in range(len(probe)):
                row.zero_()[i] = seed[i]
                found.append(
                    torch.autograd.grad(
                        outputs,
                        list(parameters.values()),
                        row,
                        retain_graph=True,
                        allow_unused=True,
                        materialize_grads=True,
                    )
                )
        named = [dict(zip(parameters, gradients, strict=True)) for gradients in found]
        coarse = coarsest(model, probe)
        return cls(outputs.detach(), seed, named, doubtful_functions(outputs), coarse)

    @property
    def finite(self) -> bool:
        """What is not is reported with the example's index when its batch comes."""
        return bool(torch.isfinite(self.outputs).all())

    @property
    def tolerance(self) -> float:
        """How far apart rounding can bring two ways of computing one gradient."""
        return ROUNDING.get(self.precision, COARSE_ROUNDING)


def disagreements(
    model: nn.Module, plan: Plan, probe: Batch, expected: Expected
) -> tuple[list[str], set[str]]:
    """Parameters whose per-example gradients differ from autograd's, and those with any."""
    recorded = trace(model, plan, probe.inputs, len(probe))
    same = torch.allclose(
        recorded.outputs,
        expected.outputs,
        rtol=expected.tolerance,
        atol=expected.tolerance * float(expected.outputs.abs().max()),
    )
    ours = recorded.own_gradients(expected.seed)
    if not ours:
        raise EngineError(
            "outputs that depend on the trainable parameters",
            "no gradient at any of them",
            "look for a detach() or no_grad() behind them; 4-bit layers of bitsandbytes that ran "
            "in eval mode on a processor have no gradients any more: load them anew",
        )
    used = set(ours)
    if not expected.finite:
        return [], used
    if not same:
        return list(expected.gradients[0]), used
    wrong: dict[str, None] = {}
    for i, theirs in enumerate(expected.gradients):
        for name, (gradient, size) in _sizes(theirs).items():
            got = ours[name][i] if name in ours else torch.zeros_like(gradient)
            if not float((got - gradient).norm()) <= expected.tolerance * size:
                wrong[name] = None
    if not wrong:
        _check_second_derivative(recorded, ours, expected)
    return list(wrong), used


def _check_second_derivative(recorded: Trace, ours: Named, expected: Expected) -> None:
    """<seed, J v> must be <J' seed, v>: the pass through the backward pass against the backward.

    Every parameter's share of the sum has about the same size, so that none is too small to miss.
    Nobody needs ``ours`` any more, which are as large as the model for every example: it is emptied
    before the pass.
    """
    sizes = [_sizes(gradients) for gradients in expected.gradients]
    largest = {name: max(size[name][1] for size in sizes) for name in ours}
    direction = {name: _random(value[0]) / (largest[name] or 1.0) for name, value in ours.items()}
    pulled = torch.stack([g.reshape(len(g), -1) @ direction[n].flatten() for n, g in ours.items()])
    ours.clear()
    pushed = (recorded.tangent(direction) * expected.seed).sum(1)
    limit = TWICE * expected.tolerance * (1 + pulled.abs().sum(0))
    if bool(((pushed - pulled.sum(0)).abs() <= limit).all()):
        return
    raise no_second_derivative(expected.functions)


def no_second_derivative(functions: Sequence[str]) -> EngineError:
    """The error of a model whose backward pass cannot be differentiated."""
    named = f"autograd functions: {', '.join(functions)}"
    return EngineError(
        "a backward pass that can be differentiated, for second derivatives of the loss",
        f"one whose derivative is lost ({named if functions else 'an operation without one'})",
        'use curvature="ggn" and leave out exact products (calibrate, refine); or write a '
        "backward of your own in operations of torch, without once_differentiable, detach or "
        "numpy, and take a parametrization away (parametrize.remove_parametrizations)",
    )


def _sizes(gradients: Named) -> dict[str, tuple[Tensor, float]]:
    """Each gradient with the size by which its error is judged: never far below all others."""
    scale = max(float(g.norm()) for g in gradients.values())
    return {name: (g, float(g.norm()) + SHARE_OF_LONGEST * scale) for name, g in gradients.items()}


def _random(like: Tensor) -> Tensor:
    """Any direction will do; uniform numbers cost a fraction of normal ones."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(like.shape, generator=generator) - 0.5).to(like)


def doubtful_functions(outputs: Tensor) -> list[str]:
    """Names of the autograd functions written in Python, or ``LACKING``, that were gone through."""
    names: dict[str, None] = {}
    seen: set[Node] = set()
    waiting = [outputs.grad_fn]
    while waiting and len(seen) < LARGEST_WALK:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names[node.name().removesuffix("Backward")] = None
        elif node.name() in LACKING:
            names[LACKING[node.name()]] = None
        waiting += [following for following, _ in node.next_functions]
    return list(names)


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
            upper, lower, here = (
                gradient(at(DIFFERENCE_STEP)),
                gradient(at(-DIFFERENCE_STEP)),
                at(0.0),
            )
            curved = [
                (g, d) for g, d in zip(gradient(here), direction, strict=True) if g.requires_grad
            ]
            found = _derivative([g for g, _ in curved], here, [d for _, d in curved])
    except RuntimeError as error:  # nothing to compare with
        pass_on(error)
        return False
    triples = zip(found, upper, lower, strict=True)
    difference = torch.cat([(f - (u - w) / (2 * DIFFERENCE_STEP)).flatten() for f, u, w in triples])
    size = torch.cat([f.flatten() for f in found]).norm() + SHORTEST_DERIVATIVE
    return bool(difference.norm() <= DIFFERENCE_TOLERANCE * size)


def _loss(model: nn.Module, probe: Batch, seed: Tensor, values: Named) -> Tensor:
    """A curved function of the outputs, in double precision."""
    buffers: Named = {name: _wide(buffer) for name, buffer in model.named_buffers()}
    args, kwargs = handed(mapped(probe.inputs, _wide))
    outputs = flat_outputs(functional_call(model, values | buffers, args, kwargs))
    return (seed * outputs.square()).sum()


def _derivative(of: list[Tensor], by: list[Tensor], weights: list[Tensor] | None) -> list[Tensor]:
    found = torch.autograd.grad(
        of, by, weights, create_graph=weights is None, allow_unused=True, materialize_grads=True
    )
    return list(found)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
