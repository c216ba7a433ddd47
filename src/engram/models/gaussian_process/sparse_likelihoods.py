"""GPyTorch likelihoods as expected losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram.core.errors import LikelihoodError
from engram.likelihoods import (
    Bernoulli,
    ExpectedCategorical,
    ExpectedGaussian,
    ExpectedLoss,
    Likelihood,
    Poisson,
    expected_loss,
)


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
