"""Responses and weights as likelihoods: what the estimators for neural nets are given."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.likelihoods import Likelihood
from engram.likelihoods.draws import Draws
from engram.models.responses import Response


class ResponseLikelihood(Likelihood):
    """A response around mu(f) at a dispersion, f [N, 1] being the linear predictor.

    Args:
        response: distribution and link.
        dispersion: what the variance is multiplied by.
        expected: Lambda as its expectation over targets, in place of the observed one.

    Example:
        >>> from engram.models.responses import Bernoulli
        >>> probit = ResponseLikelihood(Bernoulli(link="probit"))
        >>> probit.loss(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([0.6931])
    """

    def __init__(self, response: Response, dispersion: float = 1.0, expected: bool = False) -> None:
        self.response, self.dispersion, self.expected = response, dispersion, expected
        self.name = response.name

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.form(outputs, targets)
        self.response.check(targets)
        return targets

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets.to(outputs.dtype).reshape(outputs.shape)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss_at(outputs, targets, torch.ones_like(targets))

    def loss_at(self, outputs: Tensor, targets: Tensor, precisions: Tensor) -> Tensor:
        """Negative log density where each example has the dispersion over its precision [N, 1].

        A response without a dispersion has no such thing: its loss is per unit of weight. So is
        that of an example of weight 0, which would have none otherwise.
        """
        if not self.response.has_dispersion:
            precisions = torch.ones_like(precisions)
        dispersion = self.dispersion / torch.where(precisions > 0, precisions, 1.0)
        kernel = self.response.kernel(outputs, targets) / dispersion
        return (kernel + self.response.constant(targets, dispersion))[:, 0]

    @property
    def unit(self) -> str:
        return self.response.unit(self.dispersion)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.response.residual(outputs, targets) / self.dispersion

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Lambda, [N, 1]; below 0 where the loss is not convex in f."""
        if self.expected:
            return self.response.expected_curvature(outputs) / self.dispersion
        return self.response.curvature(outputs, targets) / self.dispersion

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.hessian_diagonal(outputs, targets)[:, :, None]

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return self.hessian_diagonal(outputs, targets) * vector

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # only the expectation is sure to have a root, whatever the link
        expected = self.response.expected_curvature(outputs) / self.dispersion
        return expected.sqrt()[:, :, None]

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        return self.hessian_factor(outputs, targets)[:, :, 0] * draws.signs(outputs)

    def mean(self, outputs: Tensor) -> Tensor:
        return self.response.link.mean(outputs)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        return self.response.link.slope(outputs)

    def at(self, dispersion: float, expected: bool) -> ResponseLikelihood:
        """The same response at another dispersion, or with the other Hessian."""
        return ResponseLikelihood(self.response, dispersion, expected)

    def __repr__(self) -> str:
        return f"{self.response!r} at dispersion {self.dispersion:.6g}"


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

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.base, ResponseLikelihood):
            return self.base.loss_at(outputs, targets, self.precisions)
        return self.base.loss(outputs, targets)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weights * self.base.residual(outputs, targets)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        return self.weights * self.base.hessian_times(outputs, targets, vector)

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weights.sqrt()[:, :, None] * self.base.hessian_factor(outputs, targets)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        return self.weights.sqrt() * self.base.sampled_residual(outputs, targets, draws)

    def mean(self, outputs: Tensor) -> Tensor:
        return self.base.mean(outputs)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        return self.base.mean_derivative(outputs)

    def __repr__(self) -> str:
        return f"{self.base!r}, weighted"
