"""Examples that count for more or less in the training loss: targets that carry their weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import shown
from engram.errors import LikelihoodError, TargetError
from engram.likelihoods.base import Likelihood
from engram.likelihoods.categorical import Categorical
from engram.likelihoods.draws import Draws
from engram.likelihoods.weighted import Weighted


class SampleWeighted(Likelihood):
    r"""A likelihood whose targets have the weight of their example as the last column.

    .. math:: \ell_i = w_i\, \ell(f_i, y_i)

    Leaving an example out takes its whole weight. Class numbers stand in a column of floats before
    the weights, ``torch.stack([labels.float(), weights], 1)``.

    Args:
        base: the likelihood at weight 1; categorical if not given.

    Example:
        >>> f, target = torch.zeros(1, 4), torch.tensor([[2.0, 3.0]])  # class 2 with weight 3
        >>> SampleWeighted().residual(f, target)
        tensor([[ 0.7500,  0.7500, -2.2500,  0.7500]])
    """

    name = "sample_weighted"

    def __init__(self, base: Likelihood | None = None) -> None:
        self.base = Categorical() if base is None else base
        if not isinstance(self.base, Likelihood):
            raise LikelihoodError(
                "a likelihood object to weight",
                shown(base),
                "pass for instance engram.likelihoods.Gaussian(noise_variance=0.5)",
            )
        self.shift_invariant = self.base.shift_invariant

    @property
    def unit(self) -> str:
        return f"weighted {self.base.unit}"

    @property
    def is_quadratic(self) -> bool:
        return self.base.is_quadratic

    @property
    def threshold(self) -> float | None:
        return self.base.threshold

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _check(outputs, targets)
        own, weights = _parted(outputs, targets)
        self.base.prepare(outputs, own)
        if not (torch.isfinite(weights).all() and (weights >= 0).all()):
            raise TargetError(
                "weights of at least 0 in the last column of the targets",
                f"weights from {float(weights.min()):.4g} to {float(weights.max()):.4g}",
                "give every example the weight that its loss had in training",
            )
        return targets

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets

    def labels(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return self.base.labels(outputs, _parted(outputs, targets)[0])

    def observed(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return self.base.observed(outputs, _parted(outputs, targets)[0])

    def target_probability(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return self.base.target_probability(outputs, self._parts(outputs, targets)[0])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        own, weights = self._parts(outputs, targets)
        return weights * self.base.loss(outputs, own)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weighted, own = self._weighted(outputs, targets)
        return weighted.residual(outputs, own)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        weighted, own = self._weighted(outputs, targets)
        return weighted.hessian_times(outputs, own, vector)

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weighted, own = self._weighted(outputs, targets)
        return weighted.hessian_factor(outputs, own)

    def hessian_rank(self, num_outputs: int) -> int:
        return self.base.hessian_rank(num_outputs)

    def signed_factor(
        self, outputs: Tensor, targets: Tensor, count: int, draws: Draws
    ) -> Tensor | None:
        weighted, own = self._weighted(outputs, targets)
        return weighted.signed_factor(outputs, own, count, draws)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        weighted, own = self._weighted(outputs, targets)
        return weighted.sampled_residual(outputs, own, draws)

    def mean(self, outputs: Tensor) -> Tensor:
        return self.base.mean(outputs)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        return self.base.mean_derivative(outputs)

    def _parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets in the form of the base, and the weights [N]."""
        own, weights = _parted(outputs, targets)
        return self.base.form(outputs, own), weights.to(outputs.dtype)

    def _weighted(self, outputs: Tensor, targets: Tensor) -> tuple[Weighted, Tensor]:
        own, weights = self._parts(outputs, targets)
        return Weighted(self.base, weights, torch.ones_like(weights)), own

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"base": self.base}

    @property
    def identity(self) -> str:
        """That of the base."""
        return f"SampleWeighted({self.base.identity})"

    def __repr__(self) -> str:
        return f"SampleWeighted({self.base!r})"


def _check(outputs: Tensor, targets: Tensor) -> None:
    if not targets.is_floating_point() or targets.dim() != 2 or targets.shape[1] < 2:
        raise TargetError(
            "float targets [N, 2] or wider, with the weights as the last column",
            f"{targets.dtype} of shape {tuple(targets.shape)}",
            "pass torch.stack([labels.float(), weights], 1)",
        )
    numbers = targets[:, 0]
    if _are_numbers(outputs, targets) and bool((numbers != numbers.round()).any()):
        raise TargetError(
            "class numbers in the first column of the targets",
            f"{float(numbers[numbers != numbers.round()][0]):.4g}",
            "pass torch.stack([labels.float(), weights], 1)",
        )


def _are_numbers(outputs: Tensor, targets: Tensor) -> bool:
    """Whether the targets are class numbers, one column for several outputs."""
    return targets.shape[1] == 2 and outputs.shape[1] > 1


def _parted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and weights [N]."""
    own = targets[:, :-1]
    return own[:, 0].long() if _are_numbers(outputs, targets) else own, targets[:, -1]
