"""A likelihood made from any loss function, by differentiation.

The function must give one number per example that depends on that example alone, and have
derivatives. This is checked on every batch: otherwise results would be wrong without a sign of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.arguments import shown
from engram.errors import LikelihoodError, brief
from engram.likelihoods.base import ExpectedLoss, Likelihood, LossFunction, MeanFunction
from engram.likelihoods.draws import Draws
from engram.likelihoods.sampled import Sampled

FEW = 8  # examples a batch that are evaluated once more without the others: one short pass
STEPS = (1.0, 10.0)  # of the outputs, over which a loss with jumps is seen to change
CONVEX = 1e-6  # share of the largest eigenvalue by which others may be negative, from rounding
# relative difference of losses in other batches that is rounding
SAME = {torch.float64: 1e-8}
SAME_ELSEWHERE = 1e-3  # in lower precision


class LossLikelihood(Likelihood):
    """exp(-loss) as an (unnormalised) likelihood; derivatives come from torch.func."""

    def __init__(self, function: LossFunction, mean: MeanFunction | None = None) -> None:
        self.function = function
        self._mean = mean
        self.name = getattr(function, "__name__", type(function).__name__)

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_loss(self.function, self.name, outputs, targets)
        if self._mean is not None:
            check_mean(self._mean, outputs)
        return targets

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets

    def _single(self, output: Tensor, target: Tensor) -> Tensor:
        return self.function(output[None], target[None])[0]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            return torch.autograd.grad(self.function(leaf, targets).sum(), leaf)[0]

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            hessian: Tensor = torch.func.vmap(torch.func.hessian(self._single))(
                outputs.detach(), targets
            )
        except RuntimeError:  # a branch on values, which vmap cannot take: column by column
            units = torch.eye(outputs.shape[1]).to(outputs)
            columns = [self.hessian_times(outputs, targets, u.expand_as(outputs)) for u in units]
            return torch.stack(columns, 2)
        return hessian

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            loss = self.function(leaf, targets).sum()
            gradient = torch.autograd.grad(loss, leaf, create_graph=True)[0]
            if not gradient.requires_grad:  # a loss that is linear in the outputs
                return torch.zeros_like(outputs)
            return torch.autograd.grad(gradient, leaf, vector)[0]

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(self.output_hessian(outputs, targets))
        scale = eigenvalues.abs().amax().clamp(min=torch.finfo(outputs.dtype).tiny)
        if (eigenvalues < -CONVEX * scale).any():
            raise LikelihoodError(
                "a loss that is convex in the outputs (the Gauss-Newton matrix needs its root)",
                f"an output Hessian with eigenvalue {float(eigenvalues.min()):.3g}",
                'use curvature="empirical", or structure="full" with curvature="hessian"',
            )
        return vectors * eigenvalues.clamp(min=0).sqrt()[:, None, :]

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        # No distribution to draw labels from: random signs on the Hessian's root have the same
        # covariance.
        factor = self.hessian_factor(outputs, targets)
        return (factor @ draws.signs(factor[:, 0])[:, :, None])[:, :, 0]

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs if self._mean is None else self._mean(outputs)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        if self._mean is None:
            return torch.ones_like(outputs)
        mean = self._mean
        jacobian: Tensor = torch.func.vmap(torch.func.jacrev(lambda f: mean(f[None])[0]))(outputs)
        return torch.diagonal(jacobian, dim1=1, dim2=2)

    def labels(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Class numbers, where there is a mean that has a probability for each."""
        numbers = targets.dim() == 1 and not targets.is_floating_point()
        several = self._mean is not None and outputs.shape[1] > 1
        return targets.long() if numbers and several else None

    def expectation(self) -> ExpectedLoss:
        return Sampled(self.function)

    def __repr__(self) -> str:
        return f"from_loss({self.name})"


def from_loss(function: LossFunction, mean: MeanFunction | None = None) -> Likelihood:
    """A likelihood from ``function(outputs [N, K], targets) -> [N]``.

    Args:
        function: the loss, one number per example, convex in the outputs for Gauss-Newton.
        mean: what counts as the prediction; the outputs themselves if not given.

    Example:
        >>> huber = from_loss(lambda f, y: torch.nn.functional.huber_loss(
        ...     f[:, 0], y, reduction="none"))
        >>> huber.residual(torch.tensor([[0.5], [9.0]]), torch.zeros(2))
        tensor([[0.5000],
                [1.0000]])
    """
    for name, value in (("function", function), ("mean", mean)):
        if not callable(value) and not (name == "mean" and value is None):
            raise LikelihoodError(
                f"{name} as a function of outputs" + (" and targets" if name != "mean" else ""),
                shown(value),
                "pass for instance lambda f, y: (f[:, 0] - y) ** 2",
            )
    return LossLikelihood(function, mean)


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
            f"a mean that runs on outputs {tuple(outputs.shape)}",
            brief(error),
            "return mean(outputs) [N, K]",
        ) from error
    if not isinstance(found, Tensor) or found.shape != outputs.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise LikelihoodError(
            f"predictions of the outputs' shape {tuple(outputs.shape)}",
            str(shape),
            "return one row each",
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
    tolerance = SAME.get(expected.dtype, SAME_ELSEWHERE)
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
            "engram.likelihoods.Sampled",
        )
    if gradient.any():
        return
    generator = torch.Generator().manual_seed(0)
    for scale in STEPS:
        noise = torch.randn(outputs.shape, generator=generator).to(outputs)
        gradient, moved = _slope(function, outputs + scale * noise, targets)
        if gradient is None or gradient.any() or torch.equal(moved, loss):
            continue
        raise LikelihoodError(
            "a loss with derivatives",
            f"{name!r}, which jumps: it changes with the outputs and its derivative is zero",
            "use a smooth loss; for one without derivatives see engram.likelihoods.Sampled",
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
