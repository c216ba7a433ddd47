r"""Sensitivities as they come by: every example's own, at the step that visited it.

A streamed step reads layer inputs and output gradients from the user's forward and backward pass
and adds one tangent pass. With the weights :math:`\theta_t` of that step and the precision
:math:`S_t` that the optimizer held, example i deviates by :math:`J_i S_t^{-1} J_i' e_i`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.core.arguments import positive
from engram.core.dtypes import wide
from engram.core.errors import ArgumentError, LikelihoodError
from engram.core.selection import check_indices
from engram.engine.watch import Watch
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators.base import displaced

Indices = Tensor | Sequence[int] | None
TOLERANCE, ROUNDING = 1e-2, 1e-6  # relative, and of one entry of a residual


@dataclass(frozen=True)
class Visit:
    """What one step says about its examples; NaN where there was no posterior yet."""

    loss: Tensor
    loo_loss: Tensor
    score: Tensor
    complete: bool


def check_batch_indices(indices: Indices, num_data: int) -> Tensor:
    """The examples of a step, each once; a batch that does not say which they are is an error."""
    if indices is None:
        raise ArgumentError(
            "the indices of the examples in the batch",
            "a batch without indices",
            "let the loader give them, for instance DataLoader(tracker.indexed(dataset), ...)",
        )
    once = "draw batches without replacement; a later step may visit an example again"
    return check_indices(indices, num_data, once)


def loss_factor(optimizer: Optimizer, scale: float, reduction: str, count: int) -> float:
    """The user's loss over the sum of the likelihood's: minus it where the optimizer maximises."""
    factor = positive("scale", scale, "pass the factor on the loss before backward, such as 1/4")
    signs = {-1.0 if group.get("maximize") else 1.0 for group in optimizer.param_groups}
    if len(signs) > 1:
        raise ArgumentError(
            "an optimizer that minimises or maximises",
            "one with maximize=True in some groups only",
            "set it for all groups, or for none",
        )
    return signs.pop() * (factor / count if reduction == "mean" else factor)


def visit(
    watch: Watch,
    targets: Tensor,
    likelihood: Likelihood,
    posterior: Posterior | None,
    factor: float,
) -> Visit:
    """Losses and sensitivities of a watched step.

    Args:
        watch: after the user's backward pass.
        targets: of the batch.
        likelihood: whose loss the user trains with.
        posterior: at this step; None before the optimizer has a state.
        factor: the user's loss over the sum of the likelihood's losses.
    """
    outputs = watch.outputs
    prepared = likelihood.prepare(outputs, targets.to(outputs.device))
    loss = likelihood.loss(outputs, prepared).detach()
    nothing = torch.full_like(loss, torch.nan)
    if not torch.isfinite(loss).all() or not torch.isfinite(watch.output_gradient).all():
        return Visit(loss, nothing, nothing, complete=True)
    residual = likelihood.residual(outputs, prepared).detach()
    check_loss(watch.output_gradient, residual, factor, likelihood)
    if posterior is None:
        return Visit(loss, nothing, nothing, complete=False)
    deviation = watch.deviation(residual, posterior, factor)
    change, loo_loss = displaced(likelihood, outputs, prepared, deviation)
    return Visit(loss, loo_loss, change.abs().sum(1), complete=True)


def check_loss(gradient: Tensor, residual: Tensor, factor: float, likelihood: Likelihood) -> None:
    """The gradient that arrived must be the factor times the likelihood's residual."""
    gradient, residual = wide(gradient), wide(residual)
    length = float(residual.norm())
    limit = TOLERANCE * length + ROUNDING * residual.numel() ** 0.5
    if float((gradient - factor * residual).norm()) <= abs(factor) * limit:
        return
    found = float((gradient * residual).sum()) / max(length**2, 1e-300)
    if float((gradient - found * residual).norm()) > abs(found) * limit:
        raise LikelihoodError(
            f"a loss with the gradients of {likelihood!r} for these examples",
            "other gradients at the model's outputs",
            "check that indices and batch belong together, pass targets= if they are changed on "
            "the way, and give the tracker the likelihood of your loss (likelihoods.from_loss)",
        )
    raise ArgumentError(
        f"a training loss of {factor:.6g} times the sum over the batch",
        f"{found:.6g} times it ({_meaning(found, len(residual))})",
        'set reduction="mean" or "sum" on the tracker as in your loss; where the loss is scaled '
        "before backward (accumulation, a gradient scaler), pass that scale= to tracker.step",
    )


def _meaning(factor: float, count: int) -> str:
    if abs(factor * count - 1) < 0.01:
        return "the mean over the batch"
    return "the sum over the batch" if abs(factor - 1) < 0.01 else "neither its mean nor its sum"
