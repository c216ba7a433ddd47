r"""Sequences of tokens: a softmax over the vocabulary at every position that has a label.

.. math:: \ell_i = \sum_t w_{it}\, \bigl(-\log p_{it}(y_{it})\bigr), \qquad
    e_{it} = w_{it}\, (p_{it} - y_{it}), \qquad
    \Lambda_i = \mathrm{blockdiag}_t\; w_{it}\, (\mathrm{diag}(p_{it}) - p_{it} p_{it}')

An example is a whole sequence, and its outputs are the logits of all its positions, [N, T * V]. No
matrix of the vocabulary's size is ever built: curvature is sampled, a token for every position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.core.arguments import is_number, one_of, shown, truth
from engram.core.memory import check_room
from engram.errors import DataError, LikelihoodError, TargetError
from engram.likelihoods.base import Likelihood
from engram.likelihoods.categorical import Categorical
from engram.likelihoods.draws import Draws

IGNORED = -1  # of prepared targets: a position without a label
REDUCTIONS = ("sum", "mean")
SMALLEST_VOCABULARY = 2


class Tokens(Likelihood):
    """Logits [N, T, V] and labels [N, T] of a language model, a sequence an example.

    Args:
        ignore_index: label of positions that have none: padding, or a prompt.
        shift: whether the logits at a position are for the label at the next one, as in causal
            language models; without it labels stand at their own positions.
        reduction: ``sum`` over the labelled tokens of a sequence, or their ``mean``. The loss of a
            batch that training averages over all its tokens is neither; with sequences of one
            length both are proportional to it.
        vocabulary: V; read off the model's outputs where it is not given.

    Example:
        >>> likelihood = Tokens(shift=False).for_outputs(torch.Size((2, 4)))
        >>> f, labels = torch.zeros(1, 8), torch.tensor([[3, -100]])
        >>> likelihood.loss(f, likelihood.prepare(f, labels))  # log 4, of the one labelled token
        tensor([1.3863])
    """

    name = "tokens"
    keeps_outputs = False
    samples_curvature = True

    def __init__(
        self,
        ignore_index: int = -100,
        shift: bool = True,
        reduction: str = "sum",
        vocabulary: int | None = None,
    ) -> None:
        if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
            raise LikelihoodError(
                "a whole number as ignore_index", shown(ignore_index), "use ignore_index=-100"
            )
        self.ignore_index = ignore_index
        self.shift = truth("shift", shift)
        self.reduction = one_of("reduction", reduction, REDUCTIONS, 'use "sum"')
        self.vocabulary = _vocabulary(vocabulary)

    @property
    def identity(self) -> str:
        """The settings; the vocabulary is the model's."""
        return f"Tokens({self.ignore_index}, {self.shift}, {self.reduction})"

    @property
    def unit(self) -> str:
        return "nats" if self.reduction == "sum" else "nats, a token's mean,"

    @property
    def padding(self) -> Mapping[str, float]:
        """Of the columns of a result where sequences have different lengths."""
        kept = dict.fromkeys(("outputs", "outputs_without", "deviation", "prediction_deviation"), 0)
        return {**kept, "targets": self.ignore_index}

    def for_outputs(self, shape: Sequence[int]) -> Tokens:
        """The same for a model whose outputs have this shape, without the examples: (T, V)."""
        if len(shape) != 2:
            raise DataError(
                "model outputs of shape [N, T, V], the logits of every token",
                f"shape {('N', *shape)}".replace("'", ""),
                'use likelihood="categorical" for one label per example',
            )
        if self.vocabulary not in (None, shape[1]):
            raise DataError(
                f"logits for the {self.vocabulary:,} tokens of the vocabulary",
                f"{shape[1]:,}",
                "pass the vocabulary of the model's head, or leave it out",
            )
        return Tokens(self.ignore_index, self.shift, self.reduction, _vocabulary(shape[1]))

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.by_token(outputs)
        if targets.dim() == 3:
            return targets
        if targets.is_floating_point() or targets.shape != logits.shape[:2]:
            raise TargetError(
                f"one integer label per token, {list(logits.shape[:2])}",
                f"{targets.dtype} of shape {list(targets.shape)}",
                "give labels [N, T], with ignore_index where a token has none",
            )
        found = self.form(outputs, targets)
        given = found[:, :, 0]
        outside = (targets != self.ignore_index) & ((targets < 0) | (targets >= logits.shape[2]))
        if outside.any():
            row, column = outside.nonzero()[0].tolist()
            raise TargetError(
                f"labels from 0 to {logits.shape[2] - 1}, or {self.ignore_index} for none",
                f"{int(targets[row, column])} at token {column} of row {row} of the batch",
                "check that tokenizer, labels and the model's head have one vocabulary",
            )
        empty = (given == IGNORED).all(1)
        if empty.any():
            raise TargetError(
                "a labelled token in every sequence",
                f"none in row {int(empty.nonzero()[0])} of the batch"
                + (", after the shift by one" if self.shift else ""),
                "leave sequences without labels out",
            )
        return found

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Labels at the positions whose logits they are for, [N, T, 1]; IGNORED without one."""
        if targets.dim() == 3:
            return targets
        labels = targets.long()
        if self.shift:
            labels = functional.pad(labels[:, 1:], (0, 1), value=self.ignore_index)
        return torch.where(labels == self.ignore_index, IGNORED, labels)[:, :, None]

    def labels_at(self, targets: Tensor) -> Tensor:
        """Labels at the positions whose logits they are for, [N, T]; IGNORED without one."""
        return self.form(targets, targets)[:, :, 0]

    def by_token(self, outputs: Tensor) -> Tensor:
        """[N, T * V] as [N, T, V]."""
        if self.vocabulary is None:
            raise LikelihoodError(
                "a likelihood that knows its vocabulary",
                repr(self),
                "pass vocabulary=, or use it with a model, whose outputs tell it",
            )
        return outputs.unflatten(1, (-1, self.vocabulary))

    def _weights(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """w, [N, T, 1], and labels that can be gathered by, [N, T, 1]."""
        labels = self.form(outputs, targets)
        given = labels != IGNORED
        weights = given.to(outputs.dtype)
        if self.reduction == "mean":
            weights = weights / given.sum(1, keepdim=True).clamp(min=1)
        return weights, labels.clamp(min=0)

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probabilities of the given tokens, [N, T]; 0 where there is none."""
        labels = self.form(outputs, targets)
        logits = self.by_token(outputs)
        own = logits.gather(2, labels.clamp(min=0)) - logits.logsumexp(2, keepdim=True)
        return torch.where(labels == IGNORED, torch.zeros_like(own), own)[:, :, 0]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights, _ = self._weights(outputs, targets)
        return -(weights[:, :, 0] * self.kept(outputs, targets)).sum(1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights, labels = self._weights(outputs, targets)
        probability = self.by_token(outputs).softmax(2)
        error = probability.scatter_add(2, labels, -torch.ones_like(weights))
        return (weights * error).flatten(1)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        weights, _ = self._weights(outputs, targets)
        probability, vectors = self.by_token(outputs).softmax(2), self.by_token(vector)
        inner = (probability * vectors).sum(2, keepdim=True)
        return (weights * probability * (vectors - inner)).flatten(1)

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights, _ = self._weights(outputs, targets)
        logits = self.by_token(outputs)
        count, positions, vocabulary = logits.shape
        size = count * positions**2 * vocabulary * (vocabulary - 1) * outputs.element_size()
        check_room(
            size,
            outputs.device,
            f"the root of the output Hessian of {count:,} sequences with {vocabulary:,} tokens",
            'use curvature="fisher", which samples a token for every position',
        )
        own = Categorical().hessian_factor(logits.flatten(0, 1), torch.zeros(0))
        own = own.unflatten(0, (count, positions)) * weights[..., None].sqrt()
        placed = torch.eye(positions, dtype=own.dtype, device=own.device)
        return torch.einsum("ts,ntvr->ntvsr", placed, own).flatten(3).flatten(1, 2)

    def hessian_rank(self, num_outputs: int) -> int:
        """Of all positions, labelled or not."""
        vocabulary = self.vocabulary or SMALLEST_VOCABULARY
        return num_outputs // vocabulary * (vocabulary - 1)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        weights, _ = self._weights(outputs, targets)
        probability = self.by_token(outputs).softmax(2)
        chosen = draws.chosen_at(probability)
        error = probability.scatter_add(2, chosen, -torch.ones_like(weights))
        return (weights.sqrt() * error).flatten(1)

    def mean(self, outputs: Tensor) -> Tensor:
        return self.by_token(outputs).softmax(2).flatten(1)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        probability = self.mean(outputs)
        return probability * (1 - probability)

    def kept_columns(
        self, outputs: Tensor, targets: Tensor, deviation: Tensor, prediction_deviation: Tensor
    ) -> dict[str, Tensor]:
        before, after = self.kept(outputs, targets), self.kept(outputs + deviation, targets)
        return {
            "outputs": before,
            "deviation": after - before,
            "prediction_deviation": after.exp() - before.exp(),
        }

    def __repr__(self) -> str:
        return (
            f"Tokens(ignore_index={self.ignore_index}, shift={self.shift}, "
            f"reduction={self.reduction!r})"
        )


def _vocabulary(value: Any) -> int | None:
    if value is None or (is_number(value) and int(value) == value >= SMALLEST_VOCABULARY):
        return None if value is None else int(value)
    raise LikelihoodError(
        f"a vocabulary of at least {SMALLEST_VOCABULARY} tokens",
        shown(value),
        "pass the number of the model's logits for a token",
    )
