r"""Output vectors whose back-propagated squares add up to the curvature.

The Gauss-Newton matrix is :math:`\sum_i J_i' \Lambda_i J_i = \sum_i \sum_r (J_i' u_{ir})
(J_i' u_{ir})'` for any vectors with :math:`\sum_r u_{ir} u_{ir}' = \Lambda_i`, exactly or in
expectation.
"""

from __future__ import annotations

from torch import Tensor

from engram.engine.session import Observed
from engram.likelihoods import Likelihood
from engram.likelihoods.draws import Draws


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
