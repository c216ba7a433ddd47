"""The record that a tracker keeps of the training it follows."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from engram.errors import ArgumentError, TrainingError
from engram.likelihoods import Likelihood
from engram.training.record import record
from engram.training.training import Training


def own_record(
    optimizer: Optimizer,
    model: nn.Module,
    likelihood: Likelihood,
    reduction: str,
    batch_size: int | None,
) -> Training | None:
    """A record of what the optimizer does from now on; None where that cannot be."""
    if reduction == "sum" and batch_size is None:
        return None  # the size of a step is not known
    try:
        return record(
            optimizer,
            model,
            reduction=reduction,
            training_batch_size=batch_size,
            likelihood=likelihood,
        )
    except (TrainingError, ArgumentError):
        return None  # of a kind that has no metric: everything else works without


def named_by_steps(
    training: Training | None, likelihood: Likelihood, num_data: int
) -> Training | None:
    """The record, if it is for the tracker's steps to name examples: no loader does it."""
    if training is None or training.has_loader:
        return None
    if training.visits is None:
        training.seen.likelihood = likelihood
        training.seen.sums.num_data = num_data
    return training
