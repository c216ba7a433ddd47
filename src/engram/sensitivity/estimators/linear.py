r"""``linear``: the memory-perturbation equation with the precision of all data.

.. math:: d = V e = J S^{-1} \nabla \ell_i

One backward and one tangent pass for a batch, whatever the number of outputs. It leaves the
example's own curvature in S: too small a step where its leverage is large, but never an exploding
one, whatever the posterior.
"""

from __future__ import annotations

from engram.sensitivity.estimators.base import (
    Estimate,
    Estimator,
    Observed,
    Setting,
    estimate_at,
    none_flagged,
)


def linear(observed: Observed, setting: Setting) -> Estimate:
    """d = V e of every example of a batch.

    Example:
        >>> import torch
        >>> from engram.engine.gradient_accumulator import DiscardGradients
        >>> from engram.likelihoods import Gaussian
        >>> from engram.sensitivity.estimators.base import KnownBatch
        >>> from engram.sensitivity.variance import KnownVariance
        >>> known = KnownVariance(torch.tensor([[[0.5]]]))  # leverage 1/2
        >>> f, y = torch.tensor([[3.0]]), torch.tensor([[1.0]])
        >>> setting = Setting(Gaussian(), None, 0, DiscardGradients())
        >>> linear(KnownBatch(known, f, y, f - y), setting).deviation
        tensor([[1.]])
    """
    deviation = observed.trace.deviation(observed.residual, setting.posterior, setting.total)
    none = none_flagged(observed)
    return estimate_at(observed, setting, deviation, none, None, observed.residual)


ESTIMATOR = Estimator("linear", linear)
