"""What a closure tells an optimizer: the mean loss of a batch, with its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engram.core.errors import ArgumentError, NonFiniteError, brief
from engram.core.state.process import plain_attention
from engram.engine.self_check import LACKING, doubtful_functions, no_second_derivative
from engram.likelihoods import Likelihood

Closure = Callable[[], Any]


def called(closure: Closure | None) -> Any:
    """What the closure returns, computed with gradients."""
    if closure is None:
        raise ArgumentError(
            "a closure: curvature needs the loss itself, not only its gradient",
            "step() without one",
            "call optimizer.step(closure), where closure() returns the mean loss of the batch",
        )
    # fused attention has neither a second derivative nor a batched first one
    with torch.enable_grad(), plain_attention():
        return closure()


def mean_loss(returned: Any) -> Tensor:
    """The scalar loss that a closure returned."""
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        got = type(returned).__name__
        if isinstance(returned, Tensor):
            got = f"a tensor of shape {tuple(returned.shape)}"
        raise ArgumentError(
            "a closure that returns the mean loss of the batch, one number",
            got,
            "return the loss; (outputs, targets) are for curvature=GaussNewton(likelihood)",
        )
    return _checked(returned.reshape(()))


def outputs_and_targets(returned: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, K], prepared targets and the mean loss of a closure that returned a pair."""
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not pair or not all(isinstance(part, Tensor) for part in returned):
        raise ArgumentError(
            "a closure that returns (outputs, targets), as the Gauss-Newton matrix needs",
            type(returned).__name__,
            "return model(x), y; or use another curvature and return the mean loss",
        )
    outputs, targets = returned
    outputs = outputs[:, None] if outputs.dim() == 1 else outputs
    if outputs.dim() != 2 or not len(outputs):
        raise ArgumentError(
            "outputs of shape [batch, outputs] with at least one example",
            f"shape {tuple(outputs.shape)}",
            "give each example one row",
        )
    prepared = likelihood.prepare(outputs.detach(), targets)
    return outputs, prepared, _checked(likelihood.loss(outputs, prepared).mean())


def _checked(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise ArgumentError(
            "a loss that can be differentiated",
            "one without a graph",
            "return the loss itself: no .item(), no detach(), no torch.no_grad()",
        )
    if not torch.isfinite(loss):
        raise NonFiniteError(
            "a finite loss",
            f"{float(loss.detach())}",
            "lower lr, or start nearer to a minimum; nothing was changed by this step",
        )
    return loss


def flat_gradient(loss: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> Tensor:
    """d loss / d theta, [P]; zeros for parameters that the loss does not use."""
    try:
        found = torch.autograd.grad(
            loss,
            parameters,
            create_graph=create_graph,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    except RuntimeError as error:
        if "is not implemented" in str(error):
            raise no_second_derivative([brief(error)]) from error
        if "second time" not in str(error):
            raise
        raise ArgumentError(
            "a closure that leaves differentiating to the optimizer",
            "a loss whose graph is gone",
            "do not call backward() in the closure",
        ) from error
    gradient = torch.cat([g.flatten() for g in found])
    if not torch.isfinite(gradient).all():
        raise NonFiniteError(
            "finite gradients", "NaN or infinity", "lower lr, or start nearer to a minimum"
        )
    return gradient


def curved_gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The same with its graph; EngineError where PyTorch's own derivative of it lacks a part."""
    lacking = [name for name in doubtful_functions(loss) if name in LACKING.values()]
    if lacking:
        raise no_second_derivative(lacking)
    return flat_gradient(loss, parameters, create_graph=True)
