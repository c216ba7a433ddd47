"""How sure the posterior is of each prediction."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engram.batches import Data
from engram.engine.session import session
from engram.likelihoods import Likelihood
from engram.posteriors.convert import as_posterior
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.columns import Columns
from engram.sensitivity.estimators import variance


def prediction_variance(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    likelihood: str | Likelihood | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Tensor:
    """V = J S^-1 J', the covariance of each example's outputs, [N, K, K].

    No Jacobian is held: K backward passes are contracted layer by layer.

    Args:
        model: it is not changed.
        data: any data, for instance a test set.
        posterior: of this model at its present weights.

    Example:
        >>> import torch
        >>> from engram import laplace
        >>> model, data = nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(0, 2, (9,)))
        >>> prediction_variance(model, data, laplace(model, data, structure="full")).shape
        torch.Size([9, 2, 2])
    """
    posterior = as_posterior(posterior, model)
    posterior.check_model(model)
    used = posterior.likelihood_or(likelihood)
    with session(model, data, used, batch_size, progress) as opened:
        columns = Columns(opened.batches.num_data)
        for observed in opened.passes("variances"):
            columns.add({"variance": variance(observed, posterior)})
        return columns["variance"]
