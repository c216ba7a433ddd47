"""How sure the posterior is of each prediction."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engram.core.data.batches import Data
from engram.core.memory import backing_off
from engram.engine.session import opened_passes
from engram.posteriors.convert import as_posterior
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.columns import Columns, finite
from engram.sensitivity.estimators.base import variance


@backing_off
def prediction_variance(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    batch_size: int | None = None,
    progress: bool = True,
) -> Tensor:
    """V = J S^-1 J', the covariance of each example's outputs, [N, K, K].

    No Jacobian is held: K backward passes are contracted layer by layer.

    Args:
        model: it is not changed.
        data: any data, for instance a test set; inputs alone will do, as a tensor or a dict. A
            tuple of several tensors has targets last, which are not read.
        posterior: of this model at its present weights.
        batch_size: most examples at a time; chosen from the free memory if not given.
        progress: show a bar when it takes longer than a few seconds.

    Example:
        >>> import torch
        >>> from engram import laplace
        >>> model, data = nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(0, 2, (9,)))
        >>> prediction_variance(model, data[0], laplace(model, data, structure="full")).shape
        torch.Size([9, 2, 2])
    """
    posterior = as_posterior(posterior, model)
    with opened_passes(model, data, batch_size, progress) as opened:
        columns = Columns(opened.batches.num_data)
        for trace in opened.traces("variances"):
            columns.add({"variance": variance(trace, trace.outputs, posterior)})
        return finite("variances", columns["variance"])
