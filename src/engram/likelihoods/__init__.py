"""Losses: what an output says about its target, one a file.

A :class:`Likelihood` has derivatives at an output; ``expectation()`` averages it over Gaussian
outputs. A loss with kinks or jumps has derivatives only as such an :class:`ExpectedLoss`.
"""

from __future__ import annotations

from collections.abc import Callable

from engram.core.errors import LikelihoodError
from engram.likelihoods.base import ExpectedLoss, Likelihood
from engram.likelihoods.bernoulli import Bernoulli, ExpectedBernoulli
from engram.likelihoods.categorical import Categorical, ExpectedCategorical
from engram.likelihoods.elementwise import ElementwiseLikelihood
from engram.likelihoods.from_loss import from_loss
from engram.likelihoods.gaussian import ExpectedGaussian, Gaussian
from engram.likelihoods.links import Link
from engram.likelihoods.nondifferentiable import Absolute, Hinge, Quantile, ZeroOne
from engram.likelihoods.positive import Gamma, InverseGaussian, NegativeBinomial, Poisson
from engram.likelihoods.quadrature import Quadrature
from engram.likelihoods.sampled import Sampled
from engram.likelihoods.tweedie import Tweedie

ELEMENTWISE: dict[str, type[ElementwiseLikelihood]] = {
    kind.name: kind
    for kind in (Bernoulli, Gaussian, Poisson, Gamma, InverseGaussian, NegativeBinomial, Tweedie)
}
KNOWN: dict[str, type[Likelihood]] = {"categorical": Categorical, **ELEMENTWISE}
EXPECTED: dict[str, Callable[[], ExpectedLoss]] = {
    "hinge": Hinge,
    "zero_one": ZeroOne,
    "absolute": Absolute,
    "probit": lambda: Bernoulli("probit").expectation(),
}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood that a name stands for; an object stands for itself."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in KNOWN:
        return KNOWN[likelihood]()
    raise LikelihoodError(
        f"one of {', '.join(KNOWN)}, or a Likelihood object",
        repr(likelihood),
        "for a loss of your own use engram.likelihoods.from_loss(fn)",
    )


def expected_loss(loss: str | Likelihood | ExpectedLoss) -> ExpectedLoss:
    """The averaged loss that a name or a likelihood stands for; an object stands for itself.

    Example:
        >>> expected_loss("hinge"), expected_loss("bernoulli")
        (Hinge(), expected Bernoulli())
    """
    if isinstance(loss, ExpectedLoss):
        return loss
    if isinstance(loss, str) and loss in EXPECTED:
        return EXPECTED[loss]()
    if isinstance(loss, Likelihood) or (isinstance(loss, str) and loss in KNOWN):
        return resolve(loss).expectation()
    raise LikelihoodError(
        f"one of {', '.join([*KNOWN, *EXPECTED])}, or an object such as Quantile(0.9)",
        repr(loss),
        "for a loss of your own use engram.likelihoods.Sampled(function)",
    )


__all__ = [
    "Absolute",
    "Bernoulli",
    "Categorical",
    "ElementwiseLikelihood",
    "ExpectedBernoulli",
    "ExpectedCategorical",
    "ExpectedGaussian",
    "ExpectedLoss",
    "Gamma",
    "Gaussian",
    "Hinge",
    "InverseGaussian",
    "Likelihood",
    "Link",
    "NegativeBinomial",
    "Poisson",
    "Quadrature",
    "Quantile",
    "Sampled",
    "Tweedie",
    "ZeroOne",
    "expected_loss",
    "from_loss",
    "resolve",
]
