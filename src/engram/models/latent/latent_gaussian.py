r"""Gaussian posteriors of latent vectors that the outputs are linear in.

Linear models and sparse Gaussian processes in one: each output g has a vector
:math:`u_g \sim N(m_g, S_g^{-1})` of its own, with prior :math:`N(0, I / \delta)`, and

.. math:: f_{ig} = o_{ig} + a_{ig}' u_g + \text{noise of variance } r_{ig}

The natural gradient of an example's expected loss is :math:`((e - \beta\, a'm)\, a,\;
\tfrac12 \beta\, a a')`, so the update of the Bayesian learning rule (variational online Newton) is

.. math:: S \leftarrow (1 - \rho) S + \rho \Big(\sum_i \beta_i a_i a_i' + \delta I\Big), \qquad
    m \leftarrow m - \rho\, S^{-1} \Big(\sum_i a_i e_i + \delta m\Big)

and leaving an example out moves m by :math:`S^{-1} a_i e_i`, its own output by
:math:`a_i' S^{-1} a_i\, e_i = v_i e_i`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.arguments import is_number
from engram.core.selection import check_group
from engram.errors import ArgumentError, PosteriorError
from engram.likelihoods import ExpectedLoss
from engram.models.diagnosis import Convergence
from engram.models.latent.marginals import (
    CONVERGED_GUARD,
    GUARD,
    LeftOut,
    Marginals,
    leave_one_out,
    marginal_result,
    responded,
)
from engram.sensitivity.result import Result

CONVERGED = 1e-3  # length of the natural gradient below which leverages are taken at their word
ENTRIES = 2**22  # numbers of natural gradients held at a time: 32 MB


@dataclass(frozen=True, eq=False)
class LatentGaussian:
    """The posterior N(m, S^-1) of the latent vectors, with the examples it was fitted to.

    Attributes:
        features: a, [G, N, D].
        mean: m, [G, D].
        precision: S, [G, D, D].
        prior_precision: delta.
        offset: o, [N, G].
        conditional_variance: r, [N, G].
        targets: in the form that ``loss`` prepares.
        loss: the expected loss.
        settings: what goes into the provenance of a result.
    """

    features: Tensor = field(repr=False)
    mean: Tensor = field(repr=False)
    precision: Tensor = field(repr=False)
    prior_precision: float
    offset: Tensor = field(repr=False)
    conditional_variance: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    loss: ExpectedLoss
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def factor(self) -> Tensor:
        """The lower Cholesky factor of the precision, [G, D, D]."""
        factor, failed = torch.linalg.cholesky_ex(self.precision)
        if failed.any() or not torch.isfinite(factor).all():
            raise PosteriorError(
                "a positive definite precision",
                "one that is not: more was taken out than the posterior holds",
                "leave out fewer examples, or use a smaller step size or weight",
            )
        return factor

    @cached_property
    def marginals(self) -> Marginals:
        """The outputs of the examples, with e and beta."""
        mean = self.offset + torch.einsum("gnd,gd->ng", self.features, self.mean)
        whitened = torch.linalg.solve_triangular(self.factor, self.features.mT, upper=False)
        variance = (whitened**2).sum(1).T
        total = variance + self.conditional_variance
        return Marginals(
            mean=mean,
            variance=variance,
            conditional_variance=self.conditional_variance,
            residual=self.loss.residual(mean, total, self.targets),
            curvature=self.loss.curvature(mean, total, self.targets),
            targets=self.targets,
            loss=self.loss,
        )

    @cached_property
    def gradient(self) -> Tensor:
        """Gradient of the objective by the mean, sum of a e + delta m, [G, D]."""
        losses = torch.einsum("gnd,ng->gd", self.features, self.marginals.residual)
        return losses + self.prior_precision * self.mean

    @cached_property
    def target_precision(self) -> Tensor:
        """The precision of a stationary point, sum of beta a a' + delta I, [G, D, D]."""
        weighted = self.marginals.curvature.T[:, :, None] * self.features
        return self.features.mT @ weighted + self.prior_precision * _identity(self.precision)

    @cached_property
    def natural_gradient_length(self) -> float:
        """Of the objective, in the metric of the posterior; 0 at a stationary point."""
        mean_part = torch.linalg.solve_triangular(
            self.factor, self.gradient[:, :, None], upper=False
        )
        excess = self.target_precision - self.precision
        left = torch.linalg.solve_triangular(self.factor, excess, upper=False)
        both = torch.linalg.solve_triangular(self.factor, left.mT, upper=False)
        return float(((mean_part**2).sum() + 0.5 * (both**2).sum()).sqrt())

    @cached_property
    def objective(self) -> float:
        """Sum of expected losses plus the divergence of the posterior from the prior."""
        data = self.loss.loss(self.marginals.mean, self.marginals.total_variance, self.targets)
        covariance_trace = torch.cholesky_inverse(self.factor).diagonal(dim1=1, dim2=2).sum()
        log_det = 2 * self.factor.diagonal(dim1=1, dim2=2).log().sum()
        size = self.mean.numel()
        delta = torch.as_tensor(self.prior_precision, dtype=self.mean.dtype)
        prior = delta * (covariance_trace + (self.mean**2).sum()) - size * (1 + delta.log())
        return float(data.sum() + 0.5 * (prior + log_det))

    def step(self, step_size: float, scale: float = 1.0) -> LatentGaussian:
        """One step of the natural gradient.

        Args:
            step_size: rho, between 0 and 1.
            scale: by which the sums over the examples are multiplied: all over batch size.
        """
        if not (is_number(step_size) and 0 < step_size <= 1):
            raise ArgumentError("a step size above 0, at most 1", repr(step_size), "use 0.5")
        prior = self.prior_precision * _identity(self.precision)
        curvature = scale * (self.target_precision - prior) + prior
        pull = scale * (self.gradient - self.prior_precision * self.mean)
        gradient = pull + self.prior_precision * self.mean
        moved = replace(self, precision=(1 - step_size) * self.precision + step_size * curvature)
        return replace(moved, mean=self.mean - step_size * moved.solve(gradient))

    def on(self, indices: Tensor) -> LatentGaussian:
        """The same posterior with only some of the examples."""
        return replace(
            self,
            features=self.features[:, indices],
            offset=self.offset[indices],
            conditional_variance=self.conditional_variance[indices],
            targets=self.targets[indices],
            loss=self.loss.on(indices),
        )

    def solve(self, vector: Tensor) -> Tensor:
        """S^-1 times a vector [G, D]."""
        return torch.cholesky_solve(vector[:, :, None], self.factor)[:, :, 0]

    def mean_deviations(self, indices: Sequence[int] | Tensor | None = None) -> Tensor:
        """S^-1 a_i e_i: how m moves without each of some examples, [M, G, D]."""
        chosen, _ = check_group(indices, None, len(self.offset))
        rows = self.features[:, chosen] * self.marginals.residual[chosen].T[:, :, None]
        return torch.cholesky_solve(rows.mT, self.factor).permute(2, 0, 1)

    def remove(
        self,
        indices: Sequence[int] | Tensor,
        weights: Sequence[float] | Tensor | None = None,
        step_size: float = 1.0,
    ) -> LatentGaussian:
        """The posterior without a group, by adding up natural gradients; all cross terms.

        Args:
            indices: the group.
            weights: share of each that is taken out; 1 is removal.
            step_size: rho of the equation.
        """
        chosen, shares = check_group(indices, weights, len(self.offset))
        if len(chosen) == len(self.offset) and bool((shares == 1).all()):
            raise ArgumentError("some data to remain", "all examples removed", "keep at least one")
        first = (self.precision @ self.mean[:, :, None])[:, :, 0]
        second = -0.5 * self.precision
        rows = max(1, ENTRIES // self.precision.numel())
        for part, share in zip(chosen.split(rows), shares.to(first).split(rows), strict=True):
            linear, quadratic = self._natural_gradients(part)
            first = first + equation.natural_deviation(linear, share, step_size)
            second = second + equation.natural_deviation(quadratic, share, step_size)
        without = replace(self, precision=-2 * second)
        return replace(without, mean=without.solve(first))

    def _natural_gradients(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """((e - beta a'm) a, beta a a' / 2) of some examples, [M, G, D] and [M, G, D, D]."""
        features = self.features[:, chosen].transpose(0, 1)
        curvature = self.marginals.curvature[chosen][:, :, None]
        residual = self.marginals.residual[chosen][:, :, None]
        inner = (self.marginals.mean - self.offset)[chosen][:, :, None]
        linear = (residual - curvature * inner) * features
        quadratic = 0.5 * (curvature * features)[..., :, None] * features[..., None, :]
        return linear, quadratic

    def leave_one_out(self, estimator: str = "corrected") -> LeftOut:
        """Every example's own output without it: deviation of the mean, and variance."""
        converged = self.natural_gradient_length < CONVERGED
        guard = CONVERGED_GUARD if converged else GUARD
        marginals = replace(self.marginals, guard=guard)
        if estimator != "response":
            return leave_one_out(marginals, estimator)
        spread = torch.linalg.solve_triangular(self.factor, self.features.mT, upper=False)
        return responded(marginals, spread.mT @ spread)

    def sensitivities(self, estimator: str = "corrected") -> Result:
        """How far each example's output, prediction and loss would move without it.

        Args:
            estimator: ``linear`` is the paper's v e; ``corrected`` takes the example's curvature
                out of S too and is exact for Gaussian noise; ``response`` also lets the residuals
                and curvatures of all other examples follow, for at most some thousand examples at
                a stationary posterior.
        """
        left = self.leave_one_out(estimator)
        regulariser = float((self.prior_precision * self.mean).norm())
        losses = float((self.gradient - self.prior_precision * self.mean).norm())
        norm = float(self.gradient.norm())
        relative = norm / (losses + regulariser) if losses + regulariser > 0 else 0.0
        settings = {
            "prior_precision": self.prior_precision,
            "natural_gradient_length": self.natural_gradient_length,
            **self.settings,
        }
        convergence = Convergence(norm, relative)
        return marginal_result(self.marginals, left, convergence, self, estimator, settings)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def at_prior(
    features: Tensor,
    targets: Tensor,
    loss: ExpectedLoss,
    prior_precision: float,
    offset: Tensor | None = None,
    conditional_variance: Tensor | None = None,
    settings: Mapping[str, Any] | None = None,
) -> LatentGaussian:
    """The posterior before any data: the prior, from which steps lead on."""
    groups, count, size = features.shape
    zeros = torch.zeros(count, groups, dtype=features.dtype, device=features.device)
    precision = prior_precision * torch.eye(size, dtype=features.dtype, device=features.device)
    return LatentGaussian(
        features=features,
        mean=torch.zeros(groups, size, dtype=features.dtype, device=features.device),
        precision=precision.expand(groups, size, size).clone(),
        prior_precision=prior_precision,
        offset=zeros if offset is None else offset,
        conditional_variance=zeros if conditional_variance is None else conditional_variance,
        targets=loss.prepare(zeros, targets),
        loss=loss,
        settings=settings or {},
    )
