"""Likelihoods: the loss of a model's outputs at their targets, with its first two derivatives.

Functions take a likelihood by name (``"categorical"``, ``"bernoulli"``, ``"gaussian"``,
``"poisson"``, ``"gamma"``, ...) or as an object, which can have settings:
``Gaussian(noise_variance=0.5)``, ``Bernoulli(link="probit")``, ``Gamma(dispersion=0.4)``. A *link*
says how the mean of a target depends on the model's output; :func:`from_loss` makes a likelihood
from any loss function that has derivatives.

Variational posteriors need the loss averaged over Gaussian outputs instead of at one point:
``likelihood.expectation()`` is that average, an :class:`ExpectedLoss`. Losses with kinks or jumps
(:class:`Hinge`, :class:`ZeroOne`, :class:`Absolute`, :class:`Quantile`) have derivatives only as
averages, and are given as expected losses from the start.
"""

from __future__ import annotations

from collections.abc import Callable

from engram.errors import LikelihoodError
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
from engram.likelihoods.sample_weighted import SampleWeighted
from engram.likelihoods.sampled import Sampled
from engram.likelihoods.tokens import Tokens
from engram.likelihoods.tweedie import Tweedie

ELEMENTWISE: dict[str, type[ElementwiseLikelihood]] = {
    kind.name: kind
    for kind in (Bernoulli, Gaussian, Poisson, Gamma, InverseGaussian, NegativeBinomial, Tweedie)
}
KNOWN: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    **ELEMENTWISE,
    "sample_weighted": SampleWeighted,
    "tokens": Tokens,
}
EXPECTED: dict[str, Callable[[], ExpectedLoss]] = {
    "hinge": Hinge,
    "zero_one": ZeroOne,
    "absolute": Absolute,
    "probit": lambda: Bernoulli("probit").expectation(),
}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood with this name, at its usual settings; an object is returned as it is.

    Example:
        >>> resolve("poisson")
        Poisson()
    """
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
    """The loss of this name or likelihood, averaged over Gaussian outputs; objects as they are.

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
    "SampleWeighted",
    "Sampled",
    "Tokens",
    "Tweedie",
    "ZeroOne",
    "expected_loss",
    "from_loss",
    "resolve",
]
