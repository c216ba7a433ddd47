r"""``paper``: what the authors of the paper compute, for reproduction.

.. math:: d = \mathrm{diag}(V)\, e, \qquad \sigma(f + d) - \sigma(f) \approx \sigma'(f)\, d

elementwise: each output moves by its own variance and residual alone, and predictions are
linearised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.likelihoods import Likelihood
from engram.sensitivity.estimators.base import (
    Estimate,
    Estimator,
    Observed,
    Setting,
    eigen,
    none_flagged,
    only_eigenvalue,
)
from engram.sensitivity.variance import DENSE_OUTPUTS, output_variances, variance


def linearised(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """The paper's change of the predictions, sigma'(f) d elementwise, and the losses at f + d.

    Example:
        >>> from engram.likelihoods import Bernoulli
        >>> f, y, d = torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[2.0]])
        >>> change, loss = linearised(Bernoulli(), f, y, d)
        >>> float(change)  # sigma'(0) = 1/4
        0.5
    """
    change = likelihood.mean_derivative(outputs) * deviation
    return change, likelihood.loss(outputs + deviation, targets).detach()


def paper(observed: Observed, setting: Setting) -> Estimate:
    """d = diag(V) e and predictions moved by sigma'(f) d, elementwise."""
    observed.trace.add_gradient(observed.residual, setting.posterior, setting.total)
    eigenvalues = None
    if observed.outputs.shape[1] > DENSE_OUTPUTS:
        variances = output_variances(observed.trace, observed.outputs, setting.posterior)
    else:
        covariance = variance(observed.trace, observed.outputs, setting.posterior)
        variances = torch.diagonal(covariance, dim1=1, dim2=2)
        eigenvalues = _eigenvalues(observed, setting, covariance)
    deviation = variances * observed.residual
    change, loss = linearised(setting.likelihood, observed.outputs, observed.targets, deviation)
    return Estimate(deviation, change, loss, none_flagged(observed), eigenvalues)


def _eigenvalues(observed: Observed, setting: Setting, covariance: Tensor) -> Tensor:
    """Of V Lambda: the rule does not need them, the diagnostics do."""
    if observed.outputs.shape[1] == 1:
        return only_eigenvalue(observed, setting, covariance)
    factor = setting.likelihood.hessian_factor(observed.outputs, observed.targets)
    return eigen(factor.mT @ covariance @ factor)[0]


ESTIMATOR = Estimator("paper", paper)
