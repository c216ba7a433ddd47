"""Products of each example's own Hessian with a vector of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from engram.core.data.batches import Batch, as_outputs, call
from engram.core.data.inputs import handed, mapped
from engram.core.parameters import Layout, Named, trainable
from engram.core.state.process import plain_attention
from engram.likelihoods import Likelihood


def per_example_hessian_products(
    model: nn.Module, likelihood: Likelihood, batch: Batch, targets: Tensor, vectors: Named
) -> Tensor:
    """(d2 loss_i / d theta2) v_i, [B, P], over the parameters named in the vectors.

    All examples at once where the operations can be vectorised, else one by one.

    Args:
        batch: the examples, on the model's device.
        targets: theirs, in the likelihood's own form.
        vectors: v, [B, *shape] by name.
    """
    with torch.enable_grad(), plain_attention():
        try:
            found = _vectorised(model, likelihood, batch, targets, vectors)
        except Exception:  # whatever vmap cannot do, one example after the other can
            found = _one_by_one(model, likelihood, batch, targets, vectors)
    shapes = {name: v[0] for name, v in vectors.items()}
    return Layout.of(shapes).flatten(found).detach()


def _vectorised(
    model: nn.Module, likelihood: Likelihood, batch: Batch, targets: Tensor, vectors: Named
) -> Named:
    parameters = {name: trainable(model)[name].detach() for name in vectors}

    def product(inputs: Any, target: Tensor, vector: Named) -> Named:
        def loss(values: Named) -> Tensor:
            args, kwargs = handed(inputs)
            outputs = as_outputs(functional_call(model, values, args, kwargs))
            return likelihood.loss(outputs, target[None]).sum()

        return _derivative_along(loss, vector)(parameters)

    with_batch_of_one = mapped(batch.inputs, lambda t: t[:, None])
    result: Named = vmap(product)(with_batch_of_one, targets, vectors)
    return result


def _derivative_along(loss: Callable[[Named], Tensor], vector: Named) -> Callable[[Named], Named]:
    """The gradient of <grad loss, v>, which is the Hessian times v."""

    def slope(values: Named) -> Tensor:
        gradient = grad(loss)(values)
        return torch.stack([(gradient[name] * v).sum() for name, v in vector.items()]).sum()

    derivative: Callable[[Named], Named] = grad(slope)
    return derivative


def _one_by_one(
    model: nn.Module, likelihood: Likelihood, batch: Batch, targets: Tensor, vectors: Named
) -> Named:
    parameters = [trainable(model)[name] for name in vectors]
    rows = []
    for i in range(len(batch)):
        outputs = call(model, batch.select(slice(i, i + 1)).inputs)
        loss = likelihood.loss(outputs, targets[i : i + 1]).sum()
        gradient = torch.autograd.grad(
            loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
        )
        parts = [(g * v[i]).sum() for g, v in zip(gradient, vectors.values(), strict=True)]
        slope = torch.stack(parts).sum()
        if not slope.requires_grad:
            rows.append([torch.zeros_like(p) for p in parameters])
            continue
        rows.append(
            list(torch.autograd.grad(slope, parameters, allow_unused=True, materialize_grads=True))
        )
    columns = zip(*rows, strict=True)
    return {name: torch.stack(column) for name, column in zip(vectors, columns, strict=True)}
