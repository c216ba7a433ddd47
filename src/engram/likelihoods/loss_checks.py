"""What a loss function of the user's own must be like: one number per example, of that example."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engram.core.errors import LikelihoodError, brief

LossFunction = Callable[[Tensor, Tensor], Tensor]
MeanFunction = Callable[[Tensor], Tensor]
FEW = 8  # examples that are evaluated once more, without the others


def check_loss(function: LossFunction, name: str, outputs: Tensor, targets: Tensor) -> None:
    """LikelihoodError unless it can stand for a likelihood on this batch."""
    loss = _run(function, name, outputs, targets)
    _check_shape(loss, name, len(outputs))
    rows = _few_rows(len(outputs), outputs.device)
    _check_differentiable(function, name, outputs[rows], targets[rows])
    if torch.isfinite(loss).all():  # what is not is reported with its example
        again = _run(function, name, outputs[rows], targets[rows])
        _check_independent(again, loss[rows], f"the loss {name!r}")


def check_mean(mean: MeanFunction, outputs: Tensor) -> None:
    """LikelihoodError unless it gives a row of predictions for each example by itself."""
    try:
        with torch.no_grad():
            found = mean(outputs.clone())
            rows = _few_rows(len(outputs), outputs.device)
            again = mean(outputs[rows].clone())
    except Exception as error:
        raise LikelihoodError(
            f"a mean that runs on outputs {tuple(outputs.shape)}", brief(error), "correct it"
        ) from error
    if not isinstance(found, Tensor) or found.shape != outputs.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise LikelihoodError(
            f"predictions of the outputs' shape {tuple(outputs.shape)}", str(shape), "correct it"
        )
    _check_independent(again, found[rows], "the mean")


def _run(function: LossFunction, name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """The losses; outputs and targets must be as before."""
    given = outputs.detach().clone(), targets.clone()
    try:
        with torch.no_grad():
            loss = function(*given)
    except Exception as error:
        raise LikelihoodError(
            f"a loss that runs on outputs {tuple(outputs.shape)} and targets "
            f"{tuple(targets.shape)} of type {targets.dtype}",
            f"{brief(error)} from {name!r}",
            "correct the loss, or give targets of the shape and type that it takes",
        ) from error
    if given[0]._version or given[1]._version:
        raise LikelihoodError(
            "a loss that leaves outputs and targets as they are",
            f"{name!r}, which writes into them",
            "use operations that are not in-place",
        )
    return loss


def _check_shape(loss: Tensor, name: str, count: int) -> None:
    if isinstance(loss, Tensor) and loss.shape == (count,) and loss.is_floating_point():
        return
    found = type(loss).__name__
    if isinstance(loss, Tensor):
        found = f"shape {tuple(loss.shape)} of type {loss.dtype}"
    raise LikelihoodError(
        f"one loss per example, shape ({count},)",
        f"{found} from {name!r}",
        'write the loss without mean or sum over examples, for instance with reduction="none"',
    )


def _few_rows(count: int, device: torch.device) -> Tensor:
    """Some positions in another order; one example is taken twice."""
    if count == 1:
        return torch.zeros(2, dtype=torch.long, device=device)
    step = max(2, -(-count // FEW))
    return torch.arange(0, count, step, device=device).flip(0)


def _check_independent(again: Tensor, expected: Tensor, what: str) -> None:
    tolerance = 1e-8 if expected.dtype == torch.float64 else 1e-3
    scale = float(expected.abs().max())
    if again.shape == expected.shape and torch.allclose(
        again, expected, rtol=tolerance, atol=tolerance * scale
    ):
        return
    raise LikelihoodError(
        "one loss per example that depends on this example alone, and is the same each time",
        f"other values of {what} for the same examples in another batch",
        "divide by nothing that depends on the batch (such as len(f)), and draw no numbers in it",
    )


def _check_differentiable(
    function: LossFunction, name: str, outputs: Tensor, targets: Tensor
) -> None:
    """A derivative must exist, and not be zero on both sides of a jump."""
    gradient, loss = _slope(function, outputs, targets)
    if gradient is None:
        raise LikelihoodError(
            "a loss that autograd can follow from the outputs",
            f"{name!r}, whose value carries no gradient",
            "leave out item(), detach(), numpy and comparisons; for a loss without derivatives see "
            "engram.likelihoods.expected",
        )
    if gradient.any():
        return
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 10.0):
        noise = torch.randn(outputs.shape, generator=generator).to(outputs)
        gradient, moved = _slope(function, outputs + scale * noise, targets)
        if gradient is None or gradient.any() or torch.equal(moved, loss):
            continue
        raise LikelihoodError(
            "a loss with derivatives",
            f"{name!r}, which jumps: it changes with the outputs and its derivative is zero",
            "use a smooth loss; for one without derivatives see engram.likelihoods.expected",
        )


def _slope(
    function: LossFunction, outputs: Tensor, targets: Tensor
) -> tuple[Tensor | None, Tensor]:
    with torch.enable_grad():
        leaf = outputs.detach().clone().requires_grad_()
        loss = function(leaf, targets.clone())
        if not loss.requires_grad:
            return None, loss
        found = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)[0]
    return found, loss.detach()
