"""Losses of the tokens of every sequence, with the sequence in the data and without it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.likelihoods.tokens import IGNORED


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """Nats per token, [N, T], at the positions whose logits they are of; NaN without a label.

    Args:
        loss: under the trained model.
        loo_loss: under the model without the token's sequence.

    Example:
        >>> found = TokenLosses(torch.tensor([[1.0, math.nan]]), torch.tensor([[2.0, math.nan]]))
        >>> round(found.perplexity, 3), round(found.loo_perplexity, 3)
        (2.718, 7.389)
    """

    loss: Tensor
    loo_loss: Tensor

    @classmethod
    def of(cls, log_probabilities: Tensor, deviation: Tensor, labels: Tensor) -> TokenLosses:
        """From the log probabilities of the given tokens, and how far they move without it."""
        without = torch.full_like(log_probabilities, math.nan)
        given = labels != IGNORED
        return cls(
            torch.where(given, -log_probabilities, without),
            torch.where(given, -(log_probabilities + deviation), without),
        )

    @property
    def perplexity(self) -> float:
        """exp of the mean loss of a token on the training data."""
        return _perplexity(self.loss)

    @property
    def loo_perplexity(self) -> float:
        """The same under leave-one-out, which estimates that of unseen sequences."""
        return _perplexity(self.loo_loss)


def _perplexity(losses: Tensor) -> float:
    return math.exp(float(losses.double().nanmean()))
