"""The kinds of curvature that a precision can be made of, one spelling each."""

from __future__ import annotations

from enum import Enum


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
