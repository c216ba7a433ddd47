"""A likelihood made from any loss function, by differentiation."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.arguments import shown
from engram.core.errors import LikelihoodError
from engram.likelihoods.base import Likelihood
from engram.likelihoods.draws import Draws
from engram.likelihoods.loss_checks import LossFunction, MeanFunction, check_loss, check_mean


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
        if (eigenvalues < -1e-6 * scale).any():
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
