r"""Exact Gaussian process regression: everything about leaving data out, in closed form.

With :math:`C = K + \mathrm{diag}(\sigma^2)`, :math:`\alpha = C^{-1}(y - \mu)` and
:math:`c_i = [C^{-1}]_{ii}`, the function value at i has the posterior
:math:`N(y_i - \sigma_i^2 \alpha_i,\ v_i = \sigma_i^2 (1 - \sigma_i^2 c_i))`, and without i

.. math:: y_i \mid y_{-i} \sim N(y_i - \alpha_i / c_i,\ 1 / c_i)

That is the memory-perturbation equation: with :math:`e_i = -\alpha_i` and
:math:`\beta_i = 1/\sigma_i^2`, :math:`v_i e_i / (1 - v_i \beta_i)` is the difference of the means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from engram.core.selection import check_group
from engram.errors import ArgumentError, DataError, NonFiniteError, PosteriorError
from engram.likelihoods.gaussian import ExpectedGaussian, noise_variances
from engram.models.diagnosis import Convergence
from engram.models.gaussian_process.covariance import checked_covariance
from engram.models.latent.marginals import LeftOut, Marginals, leave_one_out, marginal_result
from engram.models.numbers import as_numbers
from engram.sensitivity.result import Result


@dataclass(frozen=True)
class NewPoints:
    """Where predictions are wanted: prior mean [T], covariance with data [T, N], variance [T]."""

    mean: Tensor
    cross_covariance: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Removed:
    """The posterior of the function without a group.

    Attributes:
        indices: the group.
        weights: what share of each was taken out.
        mean: posterior mean of the function at all training inputs, [N].
        variance: its posterior variance there, [N].
        deviation: of that mean, without the group minus with it, [N].
        log_density: joint log predictive density of the group's targets, in nats; None where a
            share was not 1.
        test_mean: mean at the test points, if they were given, [T].
        test_variance: variance there, [T].
    """

    indices: Tensor
    weights: Tensor
    mean: Tensor
    variance: Tensor
    deviation: Tensor
    log_density: float | None
    test_mean: Tensor | None = None
    test_variance: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExactGaussianProcess:
    """A Gaussian process with its data; factorised once.

    Attributes:
        covariance: K at the training inputs, [N, N].
        targets: [N].
        noise_variance: of each target, [N].
        prior_mean: of the function at the training inputs, [N].
        inverse: of K + diag(noise variance).
        log_det: of K + diag(noise variance).
    """

    covariance: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    noise_variance: Tensor = field(repr=False)
    prior_mean: Tensor = field(repr=False)
    inverse: Tensor = field(repr=False)
    log_det: float = field(repr=False)

    def __repr__(self) -> str:
        noise = self.noise_variance.double()
        return (
            f"ExactGaussianProcess(N={len(self.targets):,}, noise variance "
            f"{float(noise.min()):.4g} to {float(noise.max()):.4g})"
        )

    @cached_property
    def weights(self) -> Tensor:
        """alpha, [N]."""
        return self.inverse @ (self.targets - self.prior_mean)

    @property
    def mean(self) -> Tensor:
        """Posterior mean of the function at the training inputs, [N]."""
        return self.targets - self.noise_variance * self.weights

    @property
    def variance(self) -> Tensor:
        """Posterior variance v of the function at the training inputs, [N]."""
        noise = self.noise_variance
        return noise * (1 - noise * self.inverse.diagonal())

    @property
    def loo_mean(self) -> Tensor:
        """Mean of every target given all others, [N]."""
        return self.targets - self.weights / self.inverse.diagonal()

    @property
    def loo_variance(self) -> Tensor:
        """Variance of every target given all others, its noise included, [N]."""
        return 1 / self.inverse.diagonal()

    @property
    def loo_log_density(self) -> Tensor:
        """Log predictive density of every target given all others, [N] nats."""
        square = (self.targets - self.loo_mean) ** 2 / self.loo_variance
        return -0.5 * (square + torch.log(2 * math.pi * self.loo_variance))

    @property
    def log_marginal_likelihood(self) -> float:
        """Of all targets together, nats."""
        square = float((self.targets - self.prior_mean) @ self.weights)
        return -0.5 * (square + self.log_det + len(self.targets) * math.log(2 * math.pi))

    def remove(
        self,
        indices: Sequence[int] | Tensor,
        weights: Sequence[float] | Tensor | None = None,
        evaluate_on: NewPoints | None = None,
    ) -> Removed:
        r"""The posterior without a group, exactly, from the factorisation with it.

        Taking a share :math:`\epsilon` of an example out multiplies its noise variance by
        :math:`1 / (1 - \epsilon)`; the matrix inversion lemma does the rest.

        Args:
            indices: the group.
            weights: share of each that is taken out: 1 removes it, 0.5 halves its weight,
                -1 counts it twice; more than 1 leaves no proper posterior.
            evaluate_on: test points to see the effect on.
        """
        chosen, shares = check_group(indices, weights, len(self.targets))
        self._check_shares(chosen, shares)
        active = chosen[shares != 0]
        share = shares[shares != 0].to(self.targets)
        keep = (1 - share) / (share * self.noise_variance[active])
        columns = self.inverse[:, active]
        inner = columns[active] + torch.diag(keep)
        inverse = self.inverse - columns @ torch.linalg.solve(inner, columns.T)
        without = replace(self, inverse=inverse)
        mean = self.prior_mean + self.covariance @ without.weights
        spread = ((self.covariance @ inverse) * self.covariance).sum(1)
        whole = bool((shares == 1).all())
        removed = Removed(
            indices=chosen,
            weights=shares,
            mean=mean,
            variance=(self.covariance.diagonal() - spread).clamp(min=0),
            deviation=mean - self.mean,
            log_density=self._joint_log_density(chosen) if whole else None,
        )
        if evaluate_on is None:
            return removed
        test_mean, test_variance = without.predict(evaluate_on)
        return replace(removed, test_mean=test_mean, test_variance=test_variance)

    def predict(self, points: NewPoints) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of the function at test points, [T] each."""
        if not isinstance(points, NewPoints):
            raise ArgumentError("NewPoints", type(points).__name__, "make them with points_of")
        if points.cross_covariance.shape != (len(points.mean), len(self.targets)):
            raise DataError(
                f"a cross covariance of shape {(len(points.mean), len(self.targets))}",
                f"{tuple(points.cross_covariance.shape)}",
                "give one row per test point and one column per training point",
            )
        cross, prior, own = (
            part.to(self.inverse)
            for part in (points.cross_covariance, points.mean, points.variance)
        )
        spread = ((cross @ self.inverse) * cross).sum(1)
        return prior + cross @ self.weights, (own - spread).clamp(min=0)

    def leave_one_out(self, estimator: str = "corrected") -> LeftOut:
        """Deviation of the posterior mean and the variance v; ``corrected`` is exact."""
        if estimator != "corrected":
            return leave_one_out(self.marginals, estimator)
        # 1 - v beta = noise * c, without the cancellation that a leverage near 1 would bring
        deviation = (self.loo_mean - self.mean)[:, None]
        variance = self.loo_variance - self.noise_variance
        return LeftOut(deviation, variance[:, None], torch.zeros(len(variance), dtype=torch.bool))

    @property
    def marginals(self) -> Marginals:
        """The function values at the training inputs, with e = -alpha and beta = 1 / noise."""
        noise = self.noise_variance
        return Marginals(
            mean=self.mean[:, None],
            variance=self.variance[:, None],
            conditional_variance=torch.zeros_like(noise[:, None]),
            residual=-self.weights[:, None],
            curvature=1 / noise[:, None],
            targets=self.targets[:, None],
            loss=ExpectedGaussian(noise),
        )

    def sensitivities(self, estimator: str = "corrected") -> Result:
        """Every example's effect on its own prediction; ``loo_nll`` is the exact leave-one-out.

        Args:
            estimator: ``corrected`` is exact, ``linear`` is the paper's v e.
        """
        left = self.leave_one_out(estimator)
        settings = {"model": "exact Gaussian process"}
        return marginal_result(
            self.marginals, left, Convergence(0.0, 0.0), self, estimator, settings
        )

    def _joint_log_density(self, chosen: Tensor) -> float:
        """log N(y_G | y_-G): the block of the inverse is the precision of the group."""
        precision = self.inverse[chosen][:, chosen]
        factor = torch.linalg.cholesky(precision)
        # y_G minus its mean is block^-1 alpha_G
        root = torch.linalg.solve_triangular(factor, self.weights[chosen, None], upper=False)
        log_det = 2 * factor.diagonal().log().sum()
        constant = len(chosen) * math.log(2 * math.pi)
        return float(0.5 * (log_det - (root**2).sum() - constant))

    def _check_shares(self, chosen: Tensor, shares: Tensor) -> None:
        if (shares > 1).any():
            raise PosteriorError(
                "weights of at most 1: an example can be taken out once",
                f"{float(shares.max()):.4g}",
                "use 1 for removal",
            )
        if len(chosen) == len(self.targets) and (shares == 1).all():
            raise ArgumentError("some data to remain", "all examples removed", "keep at least one")


def exact_gaussian_process(
    covariance: Tensor,
    targets: Tensor,
    noise_variance: float | Tensor,
    prior_mean: float | Tensor = 0.0,
) -> ExactGaussianProcess:
    """Gaussian process regression from a covariance matrix.

    Args:
        covariance: K at the training inputs, [N, N], without the noise.
        targets: [N].
        noise_variance: one number, or one per example.
        prior_mean: mean of the function at the training inputs, one number or [N].

    Example:
        Two function values with correlation 1/2, unit variances and noise:

        >>> K = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> gp = exact_gaussian_process(K, torch.tensor([1.0, 2.0]), 1.0)
        >>> gp.loo_mean, gp.loo_variance  # y_2 / 4, and 2 - 1/8
        (tensor([0.5000, 0.2500]), tensor([1.8750, 1.8750]))

    Reference:
        Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, section 5.4.2.
    """
    covariance, targets = checked_covariance(covariance, targets)
    noise = noise_variances(as_numbers("noise variance", noise_variance), targets[:, None])[:, 0]
    mean = as_numbers("prior mean", prior_mean).to(targets)
    if mean.dim() > 1 or (mean.dim() == 1 and len(mean) != len(targets)):
        raise DataError(
            f"one prior mean, or {len(targets)}", f"shape {tuple(mean.shape)}", "check the lengths"
        )
    if not torch.isfinite(mean).all():
        raise NonFiniteError("a finite prior mean", "NaN or infinity", "use 0.0")
    factor = torch.linalg.cholesky(covariance + torch.diag(noise))
    return ExactGaussianProcess(
        covariance=covariance,
        targets=targets,
        noise_variance=noise,
        prior_mean=mean.expand(len(targets)),
        inverse=torch.cholesky_inverse(factor),
        log_det=float(2 * factor.diagonal().log().sum()),
    )
