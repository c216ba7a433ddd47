r"""``downdated``: Kronecker factors from which the example itself is left out.

.. math:: d = J S_{-i}^{-1} \nabla \ell_i, \qquad
    S_{-i} = R \otimes \sum_{j \ne i} c_j c_j' + \delta

``linear`` with the posterior of the remaining data, which every example has of its own; see
:mod:`engram.posteriors.downdating`. Subtracting the example's Gauss-Newton matrix from S, as
``corrected`` does, would take out what the factors have averaged over all examples.
"""

from __future__ import annotations

from dataclasses import replace

from engram.posteriors.downdating import can_be_downdated, downdated
from engram.sensitivity.estimators.base import Estimator, Setting
from engram.sensitivity.estimators.linear import linear


def with_remaining_factors(setting: Setting) -> Setting:
    """The setting with factors that leave every example's own inputs out.

    Example:
        A linear model has exact factors, and the rule gives what a refit would, V e / (1 - V):

        >>> import torch, engram
        >>> x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[3.0], [1.0]]).double()
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(5 / 6)  # ridge: x'y / (x'x + 1)
        >>> posterior = engram.laplace(
        ...     model, (x, y), likelihood="gaussian", structure="kronecker", prior_precision=1.0
        ... )
        >>> found = engram.sensitivities(model, (x, y), posterior, estimator="downdated")
        >>> without = torch.stack([x[1] @ y[1:] / 5 * x[0], x[0] @ y[:1] / 2 * x[1]])
        >>> torch.allclose(found.outputs + found.deviation, without)
        True
    """
    return replace(setting, posterior=downdated(setting.posterior))


ESTIMATOR = Estimator(
    "downdated",
    linear,
    from_variance=False,
    fits=can_be_downdated,
    asks_for="a posterior with Kronecker factors",
    remedy='fit it with engram.laplace(..., structure="kronecker"), or use "linear"',
    prepare=with_remaining_factors,
)
