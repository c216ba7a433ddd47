"""What an output says about its target, one family a file."""

from __future__ import annotations

from engram.core.errors import LikelihoodError
from engram.likelihoods.base import Likelihood
from engram.likelihoods.categorical import Categorical
from engram.likelihoods.elementwise import Bernoulli, Gaussian, Poisson
from engram.likelihoods.from_loss import from_loss

KNOWN: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "poisson": Poisson,
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


__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "Poisson", "from_loss", "resolve"]
