"""Softmax over K logits."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.errors import TargetError
from engram.likelihoods.base import Likelihood, check_numbers
from engram.likelihoods.draws import Draws


class Categorical(Likelihood):
    """Softmax over K logits; targets are class numbers [N] or probabilities [N, K].

    Example:
        >>> f = torch.zeros(1, 4)
        >>> Categorical().residual(f, Categorical().prepare(f, torch.tensor([2])))
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """

    name = "categorical"

    @property
    def identity(self) -> str:
        """It has no settings."""
        return repr(self)

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        num_outputs = outputs.shape[1]
        if num_outputs < 2:
            raise TargetError(
                "at least 2 outputs for the categorical likelihood",
                f"{num_outputs} output",
                'use likelihood="bernoulli" for a model with one logit',
            )
        if targets.is_floating_point():
            return self._prepare_soft(outputs, targets)
        if targets.dim() == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]
        if targets.dim() != 1 or targets.dtype == torch.bool:
            raise TargetError(
                "one integer class number per example, [N], or soft float targets [N, K]",
                f"{targets.dtype} of shape {tuple(targets.shape)}",
                "give class numbers as int64, or probabilities as float",
            )
        outside = (targets < 0) | (targets >= num_outputs)
        if outside.any():
            where = int(outside.nonzero()[0])
            raise TargetError(
                f"class numbers from 0 to {num_outputs - 1}",
                f"{int(targets[where])} at position {where} of the batch",
                "renumber the classes, or give the model as many outputs as there are classes",
            )
        return targets.long()

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return targets.to(outputs.dtype)
        hot = outputs.new_zeros(outputs.shape)
        return hot.scatter_(1, targets.long().reshape(-1, 1), 1.0)

    def _prepare_soft(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.shape != outputs.shape:
            raise TargetError(
                f"integer class numbers [N], or soft targets of shape {tuple(outputs.shape)}",
                f"{targets.dtype} targets of shape {tuple(targets.shape)}",
                "convert class numbers with .long()",
            )
        check_numbers(targets, "soft")
        targets = targets.to(outputs.dtype)
        total = targets.sum(1)
        if (targets < 0).any() or not torch.allclose(total, torch.ones_like(total), atol=1e-4):
            raise TargetError(
                "soft targets that are non-negative and sum to 1 in every row",
                f"rows that sum to {float(total.min()):.4g} to {float(total.max()):.4g}",
                "divide every row by its sum",
            )
        return targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return -(targets * outputs.log_softmax(1)).sum(1)
        return -outputs.log_softmax(1).gather(1, targets.reshape(-1, 1))[:, 0]

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        probability = outputs.softmax(1)
        if targets.is_floating_point():
            return probability - targets
        return probability.scatter_add(1, targets.reshape(-1, 1), _minus_ones(probability))

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        probability = outputs.softmax(1)
        return probability * (vector - (probability * vector).sum(1, keepdim=True))

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # diag(s) - p s' with s = sqrt(p) squares to diag(p) - p p' and maps s to zero; reflecting
        # s onto the first axis therefore empties the first column, and K - 1 columns remain.
        probability = outputs.softmax(1)
        root = probability.sqrt()
        factor = torch.diag_embed(root) - probability[:, :, None] * root[:, None, :]
        axis = root.clone()
        axis[:, 0] += 1.0
        axis = axis / axis.norm(dim=1, keepdim=True)
        reflected = factor - 2 * (factor @ axis[:, :, None]) * axis[:, None, :]
        return reflected[:, :, 1:]

    def num_leading(self, outputs: Tensor, share: float) -> int | None:
        count = _num_leading(outputs.softmax(1).sort(dim=1, descending=True).values, share)
        return count if count + 1 < outputs.shape[1] - 1 else None

    def leading_factor(self, outputs: Tensor, targets: Tensor, count: int, draws: Draws) -> Tensor:
        # Cholesky with the likeliest class first: after r classes what is left of diag(p) - p p'
        # is that of the other classes, whose residual can be sampled from their probabilities.
        probability, order = outputs.softmax(1).sort(dim=1, descending=True, stable=True)
        tail = _tail_sums(probability)
        head = _leading_columns(probability[:, :, None], tail, count)
        rest = probability[:, count:] / tail[:, count, None]
        label = draws.chosen(rest)
        drawn = rest.scatter_add(1, label, _minus_ones(rest))
        last = torch.cat([torch.zeros_like(probability[:, :count]), drawn], dim=1)
        factor = torch.cat([head, (last * tail[:, count, None].sqrt())[:, :, None]], dim=2)
        return torch.empty_like(factor).scatter_(1, order[:, :, None].expand_as(factor), factor)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        probability = outputs.softmax(1)
        return probability.scatter_add(1, draws.chosen(probability), _minus_ones(probability))

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        probability = outputs.softmax(1)
        return probability * (1 - probability)


def _minus_ones(rows: Tensor) -> Tensor:
    return torch.full_like(rows[:, :1], -1.0)


def _tail_sums(values: Tensor) -> Tensor:
    """sum_(t >= r) of [N, K], kept from zero so that it can be divided by."""
    sums = values.flip(1).cumsum(1).flip(1)
    return sums.clamp(min=torch.finfo(values.dtype).tiny)


def _num_leading(probability: Tensor, share: float) -> int:
    """Classes to take exactly so that the others carry at most a share of tr Lambda."""
    tail = _tail_sums(probability)
    left = (tail - _tail_sums(probability.square()) / tail).clamp(min=0).sum(0)
    return int((left > share * left[0]).sum())


def _leading_columns(probability: Tensor, tail: Tensor, count: int) -> Tensor:
    """The first Cholesky columns of diag(p) - p p' for sorted p [N, K, 1], [N, K, count]."""
    own, following = tail[:, None, :count], tail[:, None, 1 : count + 1]
    leading = probability[:, :count].mT
    below = -probability * (leading / following / own).sqrt()
    columns = torch.tril(below, diagonal=-1)
    columns.diagonal(dim1=1, dim2=2).copy_((leading * following / own).sqrt()[:, 0])
    return columns
