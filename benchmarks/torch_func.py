"""The way without rules, sixty lines of torch.func: what speed is held against, and a reference.

``vmap(jvp o vjp)`` over the whole model: short, obviously right, and slow.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from engram.core.data.batches import Inputs, call
from engram.core.parameters import Named, trainable
from engram.core.state.process import plain_attention
from engram.linalg.precision import Precision


class _Outputs(nn.Module):
    """The model's outputs for one example, [K]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if kwargs:
            return call(self.model, {k: v[None] for k, v in kwargs.items()})[0]
        return call(self.model, tuple(v[None] for v in args))[0]


def deviation(model: nn.Module, inputs: Inputs, seed: Tensor, precision: Precision) -> Tensor:
    """J S^-1 J' seed by ``vmap(jvp o vjp)``, [B, K]."""
    wrapped = _Outputs(model)
    parameters: Named = {f"model.{n}": p.detach() for n, p in trainable(model).items()}

    def single(data: Inputs, cotangent: Tensor) -> Tensor:
        def outputs(values: Named) -> Tensor:
            if isinstance(data, dict):
                return functional_call(wrapped, values, (), data)
            return functional_call(wrapped, values, data)

        pull = vjp(outputs, parameters)[1]
        gradient = {n.removeprefix("model."): g for n, g in pull(cotangent)[0].items()}
        step = {f"model.{n}": v for n, v in precision.solve(gradient).items()}
        pushed: Tensor = jvp(outputs, (parameters,), (step,))[1]
        return pushed

    with torch.no_grad(), plain_attention():
        result: Tensor = vmap(single, randomness="same")(inputs, seed)
        return result
