"""The loss on data that the estimate never sees."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer

from engram.core.data.batches import Batches, Data, call
from engram.core.dtypes import wide
from engram.core.state.model import device_of, state_preserved
from engram.engine.refusals import named_failures
from engram.likelihoods import Likelihood
from engram.optimizers.ivon import at_mean
from engram.posteriors.optimizer_state import unwrapped

BATCH_SIZE = 1024


def mean_loss(model: nn.Module, data: Data, likelihood: Likelihood) -> float:
    """Nats per example, in eval mode; the model is as before afterwards."""
    total, count = 0.0, 0
    with state_preserved(model), torch.no_grad(), named_failures("on the validation data"):
        for batch in Batches(data, BATCH_SIZE):
            here = batch.to(device_of(model))
            outputs = call(model, here.inputs)
            targets = likelihood.prepare(outputs, here.targets)
            total += float(wide(likelihood.loss(outputs, targets)).sum())
            count += len(batch)
    return total / count


def validation_loss(
    model: nn.Module, optimizer: Optimizer, data: Data | None, likelihood: Likelihood
) -> float:
    """The same at the mean, also while IVON's weights are a draw; NaN without data."""
    if data is None:
        return math.nan
    with at_mean(unwrapped(optimizer)):
        return mean_loss(model, data, likelihood)
