r"""GPyTorch models: an ``ExactGP`` read, an ``ApproximateGP`` read and written, their likelihoods.

Of a variational distribution everything is in whitened coordinates: :math:`u = \mu_Z + L w` with
:math:`L L' = K_{ZZ}`, so that the prior of w is N(0, I) and :math:`a_i = L^{-1} k_{Zi}`. What a
strategy stores is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core.optional import require
from engram.errors import LikelihoodError, ModelMismatchError, PosteriorError
from engram.likelihoods import (
    Bernoulli,
    ExpectedCategorical,
    ExpectedGaussian,
    ExpectedLoss,
    Likelihood,
    Poisson,
    expected_loss,
)
from engram.models.gaussian_process.covariance import as_points
from engram.models.gaussian_process.exact import (
    ExactGaussianProcess,
    NewPoints,
    exact_gaussian_process,
)

STRATEGIES = ("VariationalStrategy", "UnwhitenedVariationalStrategy")
WRITABLE = ("CholeskyVariationalDistribution", "NaturalVariationalDistribution")


@dataclass(frozen=True)
class Inducing:
    """The inducing points of G latent functions, and the data seen through them.

    Attributes:
        features: a, [G, N, M].
        offset: prior mean, [N, G].
        conditional_variance: what the inducing values leave open, [N, G].
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


def _gaussian(likelihood: Any) -> ExpectedLoss:
    return ExpectedGaussian(likelihood.noise.detach().clone())


def _fixed_noise(likelihood: Any) -> ExpectedLoss:
    return ExpectedGaussian((likelihood.noise + likelihood.second_noise).detach().clone())


def _bernoulli(likelihood: Any) -> ExpectedLoss:
    return Bernoulli("probit").expectation()


def _poisson(likelihood: Any) -> ExpectedLoss:
    return Poisson("softplus").expectation()


def _softmax(likelihood: Any) -> ExpectedLoss:
    weights = likelihood.mixing_weights
    return ExpectedCategorical(None if weights is None else weights.detach().clone())


LIKELIHOODS: dict[str, Callable[[Any], ExpectedLoss]] = {
    "GaussianLikelihood": _gaussian,
    "FixedNoiseGaussianLikelihood": _fixed_noise,
    "BernoulliLikelihood": _bernoulli,
    "PoissonLikelihood": _poisson,
    "SoftmaxLikelihood": _softmax,
}


def as_expected_loss(likelihood: Any) -> ExpectedLoss:
    """A GPyTorch likelihood at its present parameters, or what else stands for a loss."""
    if isinstance(likelihood, str | Likelihood | ExpectedLoss):
        return expected_loss(likelihood)
    kind = type(likelihood).__name__
    if type(likelihood).__module__.split(".")[0] != "gpytorch" or kind not in LIKELIHOODS:
        raise LikelihoodError(
            f"one of gpytorch's {', '.join(LIKELIHOODS)}, or a likelihood of engram",
            kind,
            "write it as a loss function: engram.likelihoods.Sampled(function)",
        )
    return LIKELIHOODS[kind](likelihood)


def from_exact_gp(model: Any) -> ExactGaussianProcess:
    """Read prior, noise and data off an ``ExactGP`` at its present hyperparameters.

    Args:
        model: a ``gpytorch.models.ExactGP`` with one output and a ``GaussianLikelihood`` or
            ``FixedNoiseGaussianLikelihood``; it is not changed.
    """
    inputs = _train_inputs(model)
    with torch.no_grad():
        prior = model.forward(*inputs)
        covariance = prior.lazy_covariance_matrix.to_dense()
    if covariance.dim() != 2 or prior.mean.dim() != 1:
        raise ModelMismatchError(
            "one Gaussian process with one output",
            f"a prior mean of shape {tuple(prior.mean.shape)}",
            "take each process of the batch by itself",
        )
    return exact_gaussian_process(
        covariance, model.train_targets, _noise(model.likelihood), prior.mean
    )


def points_of(model: Any, inputs: Tensor) -> NewPoints:
    """The prior of an ``ExactGP`` at test inputs, and its covariance with the training inputs."""
    train = _train_inputs(model)
    if len(train) != 1:
        raise ModelMismatchError("one input tensor", f"{len(train)}", "concatenate the features")
    points, count = as_points(inputs, train[0]), len(train[0])
    with torch.no_grad():
        joint = model.forward(torch.cat([train[0], points]))
        covariance = joint.lazy_covariance_matrix
        cross = covariance[count:, :count].to_dense()
        variance = covariance.diagonal(dim1=-1, dim2=-2)[count:]
    return NewPoints(joint.mean[count:].detach(), cross, variance)


def _train_inputs(model: Any) -> tuple[Tensor, ...]:
    if not isinstance(model, require("gpytorch", extra="gp").models.ExactGP):
        raise ModelMismatchError(
            "a gpytorch.models.ExactGP", type(model).__name__, "use read_sparse for ApproximateGP"
        )
    if model.train_inputs is None or model.train_targets is None:
        raise ModelMismatchError(
            "a model with training data", "one without", "call set_train_data first"
        )
    return tuple(model.train_inputs)


def _noise(likelihood: Any) -> Tensor:
    known = require("gpytorch", extra="gp").likelihoods
    if not isinstance(
        likelihood, known.GaussianLikelihood | known.FixedNoiseGaussianLikelihood
    ) or isinstance(likelihood, known.DirichletClassificationLikelihood):
        raise LikelihoodError(
            "GaussianLikelihood or FixedNoiseGaussianLikelihood for an exact Gaussian process",
            type(likelihood).__name__,
            "use one of these, or a sparse variational Gaussian process",
        )
    with torch.no_grad():
        noise = likelihood.noise
        extra = getattr(likelihood, "second_noise", 0.0)
        return (noise + extra).reshape(-1)
