"""The kinds of curvature that a precision can be made of, one spelling each."""

from __future__ import annotations

from enum import Enum

from engram.core.arguments import one_of

CURVATURES = ("ggn", "fisher", "empirical", "hessian")  # that a posterior can be fitted with
EXACT = ("hessian", "ggn")  # whose products can be had exactly


class Curvature(str, Enum):
    """What was summed into a precision.

    ``HESSIAN`` is the observed one; ``GGN`` has the output Hessian between two Jacobians, and is
    its expectation over targets for likelihoods in canonical form; ``FISHER`` and ``EMPIRICAL`` are
    squared gradients at sampled and at given targets. ``OPTIMIZER`` is what an optimizer keeps for
    its steps, such as an average of squared gradients of batches.
    """

    HESSIAN = "hessian"
    GGN = "ggn"
    FISHER = "fisher"
    EMPIRICAL = "empirical"
    OPTIMIZER = "optimizer"

    __str__ = str.__str__


def check_exact(curvature: str) -> None:
    """ArgumentError unless it is a curvature whose products can be had exactly."""
    remedy = 'use "hessian", or "ggn" where the model is not at a minimum'
    one_of("curvature", curvature, EXACT, remedy)
