"""Products with the exact Hessian of the sum of losses: the Hessian itself is never built."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engram.core.data.batches import Batch, call
from engram.core.parameters import Named
from engram.core.state.model import device_of
from engram.core.state.process import plain_attention
from engram.curvature.batched_gradients import many_gradients
from engram.engine.session import Session


def hessian_times(
    session: Session, parameters: Mapping[str, Tensor], vectors: Mapping[str, Tensor]
) -> Named:
    """sum_i H_i v over all data for every vector [C, *shape], by parameter name."""
    total = {name: torch.zeros_like(v) for name, v in vectors.items()}
    for batch in session.batches:
        for start in range(0, len(batch), session.largest_part):
            part = batch.select(slice(start, start + session.largest_part))
            for name, value in batch_hessian_times(session, parameters, vectors, part).items():
                total[name] += value
    return total


def batch_hessian_times(
    session: Session,
    parameters: Mapping[str, Tensor],
    vectors: Mapping[str, Tensor],
    batch: Batch,
    weights: Tensor | None = None,
) -> Named:
    """The same over the examples of one batch, each with its weight, [B]."""
    session.engine.check_hessian()
    batch = batch.to(device_of(session.model))
    wanted = list(parameters.values())
    with torch.enable_grad(), plain_attention():
        outputs = call(session.model, batch.inputs)
        targets = session.likelihood.prepare(outputs.detach(), batch.targets)
        losses = session.likelihood.loss(outputs, targets)
        loss = losses.sum() if weights is None else (weights.to(losses) * losses).sum()
        gradient = torch.autograd.grad(
            loss, wanted, create_graph=True, allow_unused=True, materialize_grads=True
        )
    curved = [(g, vectors[n]) for n, g in zip(parameters, gradient, strict=True) if g.requires_grad]
    if not curved:  # the loss is linear in all of them
        return {name: torch.zeros_like(v) for name, v in vectors.items()}
    gradients, along = zip(*curved, strict=True)
    rows = many_gradients(gradients, wanted, along, len(along[0]))
    return dict(zip(parameters, rows, strict=True))
