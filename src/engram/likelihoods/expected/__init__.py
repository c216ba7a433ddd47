"""Losses averaged over Gaussian outputs, one way of averaging a file."""

from __future__ import annotations

from engram.core.errors import LikelihoodError
from engram.likelihoods.expected.base import ExpectedLoss
from engram.likelihoods.expected.gaussian import GaussianNoise
from engram.likelihoods.expected.nondifferentiable import Absolute, Hinge, Quantile, ZeroOne
from engram.likelihoods.expected.quadrature import (
    Logit,
    LogPoisson,
    Probit,
    Quadrature,
    SoftplusPoisson,
)
from engram.likelihoods.expected.sampled import Sampled
from engram.likelihoods.expected.softmax import Softmax

KNOWN: dict[str, type[ExpectedLoss]] = {
    "gaussian": GaussianNoise,
    "bernoulli": Logit,
    "probit": Probit,
    "poisson": LogPoisson,
    "categorical": Softmax,
    "hinge": Hinge,
    "zero_one": ZeroOne,
    "absolute": Absolute,
}


def expected_loss(loss: str | ExpectedLoss) -> ExpectedLoss:
    """The averaged loss that a name stands for; an object stands for itself.

    Example:
        >>> expected_loss("hinge")
        Hinge()
    """
    if isinstance(loss, ExpectedLoss):
        return loss
    if isinstance(loss, str) and loss in KNOWN:
        return KNOWN[loss]()
    raise LikelihoodError(
        f"one of {', '.join(KNOWN)}, or an ExpectedLoss such as Quantile(0.9)",
        repr(loss),
        "for a loss of your own use engram.likelihoods.expected.Sampled(function)",
    )


__all__ = [
    "Absolute",
    "ExpectedLoss",
    "GaussianNoise",
    "Hinge",
    "LogPoisson",
    "Logit",
    "Probit",
    "Quadrature",
    "Quantile",
    "Sampled",
    "Softmax",
    "SoftplusPoisson",
    "ZeroOne",
    "expected_loss",
]
