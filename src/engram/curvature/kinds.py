r"""The kinds of curvature that a precision can be made of, one spelling each, and their roots.

The Gauss-Newton matrix is :math:`\sum_i J_i' \Lambda_i J_i = \sum_i \sum_r (J_i' u_{ir})
(J_i' u_{ir})'` for any vectors with :math:`\sum_r u_{ir} u_{ir}' = \Lambda_i`, exactly or in
expectation: these u are the roots.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from engram.core.arguments import one_of
from engram.engine.session import Observed
from engram.likelihoods import Likelihood
from engram.likelihoods.draws import Draws

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


def ggn_roots(
    observed: Observed,
    likelihood: Likelihood,
    curvature: str,
    seed: int,
    num_leading: int | None = None,
) -> Tensor:
    """[B, K, R]: the root of Lambda (ggn), one sampled residual (fisher), or the residual itself
    (empirical). Of the root, so many outputs may be taken exactly and the others sampled."""
    outputs, targets = observed.outputs, observed.targets
    draws = Draws(seed, observed.batch.indices)
    if curvature == "ggn" and num_leading is not None:
        return likelihood.leading_factor(outputs, targets, num_leading, draws)
    if curvature == "ggn":
        return likelihood.hessian_factor(outputs, targets)
    if curvature == "fisher":
        return likelihood.sampled_residual(outputs, targets, draws)[:, :, None]
    return observed.residual[:, :, None]


def drawn_roots(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, draws: Draws, count: int
) -> tuple[Tensor, int]:
    """Roots of Lambda in expectation, [B, K, count], and how many of them are no draws.

    Where the likelihood takes outputs exactly, all but one are columns of its factor.
    """
    led = likelihood.signed_factor(outputs, targets, count - 1, draws)
    if led is not None:
        return led, count - 1
    streams = [replace(draws, stream=number) for number in range(count)]
    drawn = [likelihood.sampled_residual(outputs, targets, stream) for stream in streams]
    return torch.stack(drawn, 2) / math.sqrt(count), 0
