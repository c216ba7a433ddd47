"""Losses of examples that the estimate never sees: validation data, and what a twin left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.data.batches import Batch, Batches, Data, call
from engram.core.state.model import device_of, state_preserved
from engram.engine.refusals import named_failures
from engram.likelihoods import Likelihood
from engram.optimizers.ivon import at_mean
from engram.training.metrics import unwrapped

BATCH_SIZE = 1024  # examples at a time: speed against memory, of which only outputs stay


def losses_of(
    model: nn.Module,
    batches: Iterable[Batch],
    likelihood: Likelihood,
    run: Callable[[Any], Tensor],
) -> Tensor:
    """Losses in eval mode, [m]; the model is as before afterwards.

    Args:
        model: whose modes and buffers are put back.
        batches: of the examples.
        likelihood: gives the loss.
        run: outputs [B, K] from the inputs of a batch.
    """
    found = []
    with state_preserved(model), torch.no_grad():
        for batch in batches:
            here = batch.to(device_of(model))
            outputs = run(here.inputs)
            targets = likelihood.prepare(outputs, here.targets.to(outputs.device))
            found.append(likelihood.loss(outputs, targets).cpu().double())
    return torch.cat(found)


def mean_loss(model: nn.Module, data: Data, likelihood: Likelihood) -> float:
    """Mean loss of other data, in nats per example, in eval mode."""
    with named_failures("on the validation data"):
        parts = Batches(data, BATCH_SIZE)
        return float(losses_of(model, parts, likelihood, lambda x: call(model, x)).mean())


def validation_loss(
    model: nn.Module, optimizer: Optimizer, data: Data | None, likelihood: Likelihood
) -> float:
    """Mean validation loss, at IVON's mean where its weights are a draw; NaN without data."""
    if data is None:
        return math.nan
    with at_mean(unwrapped(optimizer)):
        return mean_loss(model, data, likelihood)
