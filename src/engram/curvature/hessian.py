"""The exact Hessian of the sum of losses over some parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram.core.data.batches import call
from engram.core.dtypes import widest
from engram.core.parameters import Layout, trainable
from engram.core.state.model import device_of
from engram.core.state.process import plain_attention
from engram.curvature.batched_gradients import many_gradients
from engram.engine.session import Session

ROWS_AT_ONCE = 64


def hessian(session: Session, layout: Layout) -> Tensor:
    """sum_i d2 loss_i / d theta2, [P, P], in the widest precision."""
    session.engine.check_hessian()
    model = session.model
    parameters = [trainable(model)[name] for name in layout.names]
    size = layout.num_params
    device = device_of(model)
    total = torch.zeros(size, size, dtype=widest(device), device=device)
    for part in session.parts(session.batches, "Hessian", len(session.batches)):
        batch = session.placed(part)
        with (
            torch.enable_grad(),
            plain_attention(),
        ):
            outputs = call(model, batch.inputs)
            targets = session.likelihood.prepare(outputs.detach(), batch.targets)
            loss = session.likelihood.loss(outputs, targets).sum()
            gradient = torch.autograd.grad(
                loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
            )
            flat = torch.cat([g.flatten() for g in gradient])
        total += hessian_rows(flat, parameters)
    return 0.5 * (total + total.mT)


def hessian_rows(flat: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """[P, P] from a gradient [P] that still has its graph; zeros where it depends on nothing."""
    size = flat.numel()
    if not flat.requires_grad:
        return flat.new_zeros(size, size)
    identity = torch.eye(size, dtype=flat.dtype, device=flat.device)
    rows = []
    for chunk in identity.split(ROWS_AT_ONCE):
        parts = many_gradients([flat], parameters, [chunk], len(chunk))
        rows.append(torch.cat([part.reshape(len(chunk), -1) for part in parts], dim=1))
    return torch.cat(rows)
