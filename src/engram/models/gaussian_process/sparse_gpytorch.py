r"""The variational distribution of a GPyTorch ``ApproximateGP``, read and written.

Everything is in whitened coordinates: :math:`u = \mu_Z + L w` with :math:`L L' = K_{ZZ}`, so that
the prior of w is N(0, I) and :math:`a_i = L^{-1} k_{Zi}`. What a strategy stores is converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core.errors import ModelMismatchError, PosteriorError
from engram.core.optional import require
from engram.models.gaussian_process.covariance import as_points

STRATEGIES = ("VariationalStrategy", "UnwhitenedVariationalStrategy")
WRITABLE = ("CholeskyVariationalDistribution", "NaturalVariationalDistribution")


@dataclass(frozen=True)
class Inducing:
    """The inducing points of G latent functions, and the data seen through them.

    Attributes:
        features: a, [G, N, M].
        offset, conditional_variance: prior mean and what the inducing values leave open, [N, G].
        prior_mean: at the inducing points, [G, M].
        factor: L, [G, M, M].
    """

    features: Tensor
    offset: Tensor
    conditional_variance: Tensor
    prior_mean: Tensor
    factor: Tensor


def base_strategy(model: Any) -> Any:
    """The strategy that holds the inducing points; the wrapper of independent tasks is opened."""
    library = require("gpytorch", extra="gp")
    if not isinstance(model, library.models.ApproximateGP):
        raise ModelMismatchError(
            "a gpytorch.models.ApproximateGP", type(model).__name__, "use from_exact_gp for ExactGP"
        )
    strategy = model.variational_strategy
    if type(strategy) is library.variational.IndependentMultitaskVariationalStrategy:
        strategy = strategy.base_variational_strategy
    if type(strategy).__name__ not in STRATEGIES:
        raise ModelMismatchError(
            f"{' or '.join(STRATEGIES)}, alone or in an IndependentMultitaskVariationalStrategy",
            type(strategy).__name__,
            "use one of these strategies",
        )
    return strategy


def inducing(model: Any, inputs: Tensor) -> Inducing:
    """The prior at inducing points and inputs, as the strategy itself would use it."""
    strategy = base_strategy(model)
    points = strategy.inducing_points
    inputs = as_points(inputs, points)
    count, jitter = points.shape[-2], strategy.jitter_val
    with torch.no_grad():
        tiled = inputs.expand(*points.shape[:-2], *inputs.shape)
        prior = strategy.model.forward(torch.cat([points, tiled], dim=-2))
        covariance = prior.lazy_covariance_matrix
        identity = torch.eye(count, dtype=points.dtype, device=points.device)
        square = _groups(covariance[..., :count, :count].to_dense(), 2) + jitter * identity
        factor, failed = torch.linalg.cholesky_ex(square)
        if failed.any():
            raise PosteriorError(
                "a positive definite covariance of the inducing points",
                f"one that is not, with jitter {jitter:.1e}",
                "remove repeated inducing points or raise jitter_val of the strategy",
            )
        cross = _groups(covariance[..., :count, count:].to_dense(), 2)
        features = torch.linalg.solve_triangular(factor, cross, upper=False).mT
        own = _groups(covariance.diagonal(dim1=-1, dim2=-2)[..., count:], 1)
        if type(strategy).__name__ == "VariationalStrategy":
            own = own + jitter  # as that strategy does in its predictions
        left = (own - (features**2).sum(2)).clamp(min=0)
        mean = _groups(prior.mean.detach(), 1)
    return Inducing(features, mean[:, count:].T, left.T, mean[:, :count], factor)


def read_distribution(model: Any, prior: Inducing) -> tuple[Tensor, Tensor]:
    """Mean [G, M] and precision [G, M, M] of the whitened inducing values."""
    strategy = base_strategy(model)
    if not bool(strategy.variational_params_initialized):
        raise PosteriorError(
            "a variational distribution that has been trained",
            "one that is not initialised",
            "train the model, call it once, or use fit_sparse",
        )
    with torch.no_grad():
        distribution = strategy._variational_distribution()
        if not isinstance(
            distribution, require("gpytorch", extra="gp").distributions.MultivariateNormal
        ):
            raise PosteriorError(
                "a Gaussian variational distribution",
                type(strategy._variational_distribution).__name__,
                "use a Cholesky, mean-field or natural variational distribution",
            )
        mean = _groups(distribution.mean.detach(), 1)
        covariance = _groups(distribution.covariance_matrix, 2)
        if type(strategy).__name__ == "UnwhitenedVariationalStrategy":
            factor = prior.factor
            difference = (mean - prior.prior_mean)[:, :, None]
            mean = torch.linalg.solve_triangular(factor, difference, upper=False)[:, :, 0]
            half = torch.linalg.solve_triangular(factor, covariance, upper=False)
            covariance = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any() or not torch.isfinite(factor).all():
        raise PosteriorError(
            "a positive definite variational covariance", "one that is not", "train it further"
        )
    return mean, torch.cholesky_inverse(factor)


def check_writable(model: Any) -> None:
    """Whether the distribution's parameters can be set from a mean and a precision."""
    kind = type(base_strategy(model)._variational_distribution).__name__
    if kind not in WRITABLE:
        raise PosteriorError(f"one of {', '.join(WRITABLE)}", kind, "use one of these")


def write_distribution(model: Any, prior: Inducing, mean: Tensor, precision: Tensor) -> None:
    """Set the variational distribution from whitened mean and precision."""
    strategy = base_strategy(model)
    stored = strategy._variational_distribution
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    if type(strategy).__name__ == "UnwhitenedVariationalStrategy":
        mean = prior.prior_mean + (prior.factor @ mean[:, :, None])[:, :, 0]
        covariance = prior.factor @ covariance @ prior.factor.mT
        precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    with torch.no_grad():
        if type(stored).__name__ == "NaturalVariationalDistribution":
            natural = (precision @ mean[:, :, None])[:, :, 0]
            stored.natural_vec.copy_(natural.reshape(stored.natural_vec.shape))
            stored.natural_mat.copy_((-0.5 * precision).reshape(stored.natural_mat.shape))
        else:
            root = torch.linalg.cholesky(covariance)
            stored.variational_mean.copy_(mean.reshape(stored.variational_mean.shape))
            stored.chol_variational_covar.copy_(root.reshape(stored.chol_variational_covar.shape))
    strategy.variational_params_initialized.fill_(1)
    strategy._clear_cache()


def _groups(tensor: Tensor, dimensions: int) -> Tensor:
    """One leading dimension for the latent functions, whether or not there is a batch."""
    shape = tensor.shape[tensor.dim() - dimensions :]
    if tensor.dim() > dimensions + 1:
        raise ModelMismatchError(
            "latent functions along one batch dimension",
            f"a prior of shape {tuple(tensor.shape)}",
            "use a batch shape of one dimension",
        )
    return tensor.reshape(-1, *shape)
