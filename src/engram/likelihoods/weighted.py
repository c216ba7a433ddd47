"""A likelihood whose examples have weights: what the estimators for neural nets are given."""

from __future__ import annotations

from torch import Tensor

from engram.likelihoods.base import Likelihood
from engram.likelihoods.draws import Draws


class Weighted(Likelihood):
    """A likelihood whose examples have weights w_i in residual and Hessian.

    Args:
        base: at weight 1.
        weights: of the examples, [N]; a share of them where a share is taken out.
        precisions: by which a dispersion is divided in the loss, [N].
    """

    def __init__(self, base: Likelihood, weights: Tensor, precisions: Tensor) -> None:
        self.base, self.name = base, base.name
        self.weights, self.precisions = weights[:, None], precisions[:, None]

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.base.prepare(outputs, targets)

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.base.form(outputs, targets)

    def labels(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return self.base.labels(outputs, targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.base.loss_at(outputs, targets, self.precisions)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weights * self.base.residual(outputs, targets)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return self.weights * self.base.hessian_times(outputs, targets, vector)

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weights.sqrt()[:, :, None] * self.base.hessian_factor(outputs, targets)

    def hessian_rank(self, num_outputs: int) -> int:
        return self.base.hessian_rank(num_outputs)

    def signed_factor(
        self, outputs: Tensor, targets: Tensor, count: int, draws: Draws
    ) -> Tensor | None:
        factor = self.base.signed_factor(outputs, targets, count, draws)
        return None if factor is None else self.weights.sqrt()[:, :, None] * factor

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        return self.weights.sqrt() * self.base.sampled_residual(outputs, targets, draws)

    def mean(self, outputs: Tensor) -> Tensor:
        return self.base.mean(outputs)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        return self.base.mean_derivative(outputs)

    def __repr__(self) -> str:
        return f"{self.base!r}, weighted"
