r"""How sure the posterior is of each prediction: :math:`V = J S^{-1} J'`, or products with it.

Estimators of models with many outputs never build V: :math:`V e` is the tangent along the step
:math:`S^{-1} J' e`, one backward and one tangent pass for all examples of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO
from engram.core.data.batches import Data
from engram.core.data.columns import Columns, finite
from engram.core.memory import backing_off
from engram.core.progress import Pace
from engram.engine.gradient_accumulator import GradientSink
from engram.engine.passes import QUICKER
from engram.engine.session import opened_passes
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior

#: Outputs up to which V [K, K] is built, by K backward passes; beyond, V is only applied, one
#: backward and tangent pass a product. Trades K passes for the rounds of an iteration.
DENSE_OUTPUTS = 32


@backing_off
def prediction_variance(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Tensor:
    """V = J S^-1 J', the covariance of each example's outputs, [N, K, K].

    No Jacobian is held: K backward passes are contracted layer by layer.

    Args:
        model: it is not changed.
        data: any data, for instance a test set; inputs alone will do, as a tensor or a dict. A
            tuple of several tensors has targets last, which are not read.
        posterior: of this model at its present weights.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        progress: show a bar when it takes longer than a few seconds.

    Example:
        >>> import torch
        >>> from engram import laplace
        >>> model, data = nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(0, 2, (9,)))
        >>> prediction_variance(model, data[0], laplace(model, data, prior_precision=1.0)).shape
        torch.Size([9, 2, 2])
    """
    posterior = as_posterior(posterior, model)
    with opened_passes(model, data, batch_size, progress) as opened:
        columns = Columns(opened.batches.num_data)
        for trace in opened.traces("variances"):
            columns.add({"variance": variance(trace, trace.outputs, posterior)})
        return finite("variances", columns["variance"])


class Products(Protocol):
    """Products with V = J S^-1 J': the engine's trace, or V itself where it is known."""

    def deviation(
        self, residual: Tensor, posterior: Posterior, total: GradientSink | None = None
    ) -> Tensor:
        """V e, [B, K]."""

    def inner_products(self, vectors: Tensor, posterior: Posterior) -> Tensor:
        """F' V F for vectors F [B, K, R]."""

    def add_gradient(self, residual: Tensor, posterior: Posterior, total: GradientSink) -> None:
        """Add the gradient of the batch to the total."""


@dataclass(frozen=True, eq=False)
class KnownVariance:
    """Products with V where it is known for every example of a batch, [B, K, K].

    Example:
        >>> known = KnownVariance(torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]))
        >>> known.deviation(torch.tensor([[1.0, -1.0]]))
        tensor([[ 1., -2.]])
    """

    variances: Tensor

    def deviation(
        self,
        residual: Tensor,
        posterior: Posterior | None = None,
        total: GradientSink | None = None,
    ) -> Tensor:
        """V e."""
        if residual.shape[1] == 1:
            return self.variances[:, :, 0] * residual
        return (self.variances @ residual[:, :, None])[:, :, 0]

    def inner_products(self, vectors: Tensor, posterior: Posterior | None = None) -> Tensor:
        """F' V F; where F is the identity, V itself."""
        if vectors.shape[1] == 1:
            return vectors.mT * self.variances * vectors
        return vectors.mT @ self.variances @ vectors

    def add_gradient(self, residual: Tensor, posterior: Posterior, total: GradientSink) -> None:
        """Nothing: who knows V knows the gradient too."""


def variance(trace: Products, outputs: Tensor, posterior: Posterior) -> Tensor:
    """V = J S^-1 J', [B, K, K], contracted layer by layer."""
    identity = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    return trace.inner_products(identity.expand(len(outputs), -1, -1), posterior)


def output_variances(trace: Products, outputs: Tensor, posterior: Posterior) -> Tensor:
    """The diagonal of V, [B, K], without V: some outputs at a time."""
    parts = torch.arange(outputs.shape[1], device=outputs.device).split(DENSE_OUTPUTS)
    pace = Pace(len(parts), f"times {DENSE_OUTPUTS} backward passes for a batch", QUICKER)
    found = []
    for part in parts:
        vectors = torch.zeros(*outputs.shape, len(part), dtype=outputs.dtype, device=outputs.device)
        vectors[:, part, torch.arange(len(part))] = 1
        products = trace.inner_products(vectors, posterior)
        found.append(torch.diagonal(products, dim1=1, dim2=2))
        pace.step()
    return torch.cat(found, dim=1)
