"""The distribution of a target around its mean, one a file."""

from __future__ import annotations

from engram.core.errors import ArgumentError
from engram.models.responses.base import Response
from engram.models.responses.bernoulli import Bernoulli
from engram.models.responses.gaussian import Gaussian
from engram.models.responses.links import Link
from engram.models.responses.negative_binomial import NegativeBinomial
from engram.models.responses.power import Gamma, InverseGaussian, Poisson, Tweedie

RESPONSES: dict[str, type[Response]] = {
    kind.name: kind
    for kind in (Gaussian, Bernoulli, Poisson, Gamma, InverseGaussian, NegativeBinomial, Tweedie)
}


def response_named(response: str | Response, link: str | Link | None = None) -> Response:
    """The response with this name and link; an object stands for itself."""
    if isinstance(response, Response) and link is None:
        return response
    if isinstance(response, str) and response in RESPONSES:
        return RESPONSES[response](link=link)
    raise ArgumentError(
        f"response to be one of {', '.join(RESPONSES)}, or a Response object with its link inside",
        f"{response!r} with link {link!r}",
        'use response="bernoulli", link="probit", or Bernoulli(link="probit")',
    )


def tweedie(power: float, link: str | Link | None = None) -> Response:
    """The response with variance mu^power; for 0, 2 and 3 the one with a density in closed form."""
    special: dict[float, type[Response]] = {0.0: Gaussian, 2.0: Gamma, 3.0: InverseGaussian}
    return special[power](link) if power in special else Tweedie(power, link)


__all__ = [
    "Bernoulli",
    "Gamma",
    "Gaussian",
    "InverseGaussian",
    "NegativeBinomial",
    "Poisson",
    "Response",
    "Tweedie",
    "response_named",
    "tweedie",
]
