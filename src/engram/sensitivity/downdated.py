"""A sixth rule: the step with Kronecker factors from which the example itself is left out."""

from __future__ import annotations

from dataclasses import replace

from engram.core.errors import ArgumentError
from engram.posteriors.downdating import can_be_downdated, downdated
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators import Estimate, Observed, Setting, linear


class DowndatedStep:
    """``linear`` with the Kronecker posterior of the remaining data, which every example has.

    Args:
        posterior: with Kronecker factors.
    """

    def __init__(self, posterior: Posterior) -> None:
        if not can_be_downdated(posterior):
            raise ArgumentError(
                'a posterior with Kronecker factors for estimator="downdated"',
                repr(posterior),
                'fit it with engram.laplace(..., structure="kronecker"), or use "linear"',
            )
        self.remaining = downdated(posterior)

    def __call__(self, observed: Observed, setting: Setting) -> Estimate:
        """d of every example of a batch."""
        return linear(observed, replace(setting, posterior=self.remaining))
