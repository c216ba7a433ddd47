"""GPyTorch likelihoods as expected losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram.core.errors import LikelihoodError
from engram.likelihoods.expected import (
    ExpectedLoss,
    GaussianNoise,
    Probit,
    Softmax,
    SoftplusPoisson,
    expected_loss,
)


def _gaussian(likelihood: Any) -> ExpectedLoss:
    return GaussianNoise(likelihood.noise.detach().clone())


def _fixed_noise(likelihood: Any) -> ExpectedLoss:
    return GaussianNoise((likelihood.noise + likelihood.second_noise).detach().clone())


def _bernoulli(likelihood: Any) -> ExpectedLoss:
    return Probit()


def _poisson(likelihood: Any) -> ExpectedLoss:
    return SoftplusPoisson()


def _softmax(likelihood: Any) -> ExpectedLoss:
    weights = likelihood.mixing_weights
    return Softmax(None if weights is None else weights.detach().clone())


LIKELIHOODS: dict[str, Callable[[Any], ExpectedLoss]] = {
    "GaussianLikelihood": _gaussian,
    "FixedNoiseGaussianLikelihood": _fixed_noise,
    "BernoulliLikelihood": _bernoulli,
    "PoissonLikelihood": _poisson,
    "SoftmaxLikelihood": _softmax,
}


def as_expected_loss(likelihood: Any) -> ExpectedLoss:
    """A GPyTorch likelihood at its present parameters, a name, or an expected loss as it is."""
    if isinstance(likelihood, str | ExpectedLoss):
        return expected_loss(likelihood)
    kind = type(likelihood).__name__
    if type(likelihood).__module__.split(".")[0] != "gpytorch" or kind not in LIKELIHOODS:
        raise LikelihoodError(
            f"one of gpytorch's {', '.join(LIKELIHOODS)}, or an ExpectedLoss",
            kind,
            "write an ExpectedLoss for it, or use engram.likelihoods.expected.Sampled(function)",
        )
    return LIKELIHOODS[kind](likelihood)
